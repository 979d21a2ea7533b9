// Puts the parts together.

const MOST_RESULTS = 50;

class Search {
  constructor(model, input, list, onPick) {
    Object.assign(this, { model, input, list, rows: list.querySelector("ul"), onPick, nodes: [], at: -1 });
    input.addEventListener("input", () => this.look());
    input.addEventListener("focus", () => this.look());
    input.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("pointerdown", (event) => { if (!input.parentElement.contains(event.target)) this.hide(); });
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); input.focus(); }
    });
  }

  look() {
    const text = this.input.value.trim();
    if (!text) { this.hide(); return; }
    const { total, nodes } = this.model.search(text, MOST_RESULTS);
    this.nodes = nodes;
    this.rows.replaceChildren(...nodes.map((node, row) => this.row(node, row)));
    this.rows.hidden = !nodes.length;
    by("result-note").textContent = !nodes.length ? "No node has that in its name." : total > nodes.length ? `and ${counted(total - nodes.length)} more` : "";
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.go(nodes.length ? 0 : -1);
  }

  row(node, row) {
    const { nodes } = this.model, time = nodes.time[node] > 0 ? ` · ${micros(nodes.time[node])}` : "";
    const where = nodes.host[node] ? "host" : `stream ${nodes.stream[node]}`;
    return make("li", { role: "option", id: `result-${row}`, onclick: () => this.pick(row) },
      this.model.shortName(nodes.name[node]), make("div", { class: "what" }, `${nodes.ops[nodes.op[node]]} · ${where}${time}`));
  }

  go(row) {
    this.at = row;
    [...this.rows.children].forEach((item, index) => item.setAttribute("aria-selected", index === row));
    if (row >= 0) { this.input.setAttribute("aria-activedescendant", `result-${row}`); this.rows.children[row].scrollIntoView({ block: "nearest" }); }
    else this.input.removeAttribute("aria-activedescendant");
  }

  key(event) {
    if (event.key === "Escape") { this.hide(); return; }
    if (this.list.hidden || !this.nodes.length) return;
    if (event.key === "ArrowDown") this.go((this.at + 1) % this.nodes.length);
    else if (event.key === "ArrowUp") this.go((this.at + this.nodes.length - 1) % this.nodes.length);
    else if (event.key === "Enter") this.pick(this.at);
    else return;
    event.preventDefault();
  }

  pick(row) { this.hide(); this.input.blur(); this.onPick(this.nodes[row]); }
  hide() { this.list.hidden = true; this.input.setAttribute("aria-expanded", "false"); }
}

function legend(model) {
  const load = new Map();
  model.leaves.node.forEach((node, leaf) => {
    if (node >= 0) load.set(model.leaves.stream[leaf], (load.get(model.leaves.stream[leaf]) ?? 0) + model.nodes.time[node]);
  });
  const key = (kind, text) => make("li", { class: "op" }, make("span", { class: `key ${kind}`, "aria-hidden": "true" }), text);
  by("legend").replaceChildren(
    ...model.lanes.map((stream) => make("li", {}, chip(stream), ` ${micros(load.get(stream))}`)),
    key("plain", "one needs what the other makes"),
    ...(model.lanes.length > 1 ? [
      key("dashed", "from one stream to another"), key("mixed", "a box on several streams, by their time"), key("wait", "timeline: a wait"),
    ] : []),
    ...(model.elements > model.leafCount ? [key("box", "several kernels: double-click opens it")] : []),
    ...(model.leaves.node.includes(-1) ? [key("joint", "a join of control edges")] : []),
    key("picked", "selected"), key("critical", "on the critical path, while that is shown"));
}

async function begin() {
  const data = await unpack(), model = new Model(data);
  let element = -1;
  let graph = null;
  const state = (line) => { by("time-state").textContent = `${micros(line.from)} to ${micros(line.to)} of ${micros(line.extent)}`; };
  let compared = null;
  // What one of the two timelines shows, the other does.
  const follow = (line, other) => {
    state(line);
    if (other && !by("compared").hidden && (other.from !== line.from || other.to !== line.to)) { other.from = line.from; other.to = line.to; other.draw(); }
  };
  const timeline = new Timeline(model, by("lanes"), by("tip"), (node) => find(node), (line) => follow(line, compared));
  const tell = (kind, run) => {
    by(`${kind}-about`).textContent = run.about;
    by(`${kind}-command`).textContent = run.command;
    by(`${kind}-command`).hidden = !run.command;
  };
  tell("own", timeline.run);
  by("beside").replaceChildren(make("option", { value: "0" }, "nothing"), ...model.runs.map((run, number) => make("option", { value: number + 1 }, run.name)));
  by("beside-label").hidden = !model.runs.length;
  function compare(number) {
    const run = model.runs[number - 1];
    by("beside").value = `${run ? number : 0}`;
    by("compared").hidden = !run;
    const extent = Math.max(model.makespan, run ? run.makespan : 0);
    if (run) {
      tell("beside", run);
      compared ??= new Timeline(model, by("beside-lanes"), by("tip"), (node) => find(node), (line) => follow(line, timeline));
      compared.critical = timeline.critical;
      compared.selected = timeline.selected;
      compared.take(run, extent);
    }
    timeline.take(model.ownRun(), extent);
  }
  by("beside").addEventListener("change", () => compare(Number(by("beside").value)));
  const buttons = () => {
    by("open").disabled = element < 0 || !model.isBox(element) || graph.opened.includes(element);
    by("close").disabled = element < 0 || graph.opened.length === 0 || owner() < 0;
    by("close-all").disabled = graph.opened.length === 0;
  };
  // What "Close" closes: the selected box if it is open, else the box around the selection.
  const owner = () => (graph.opened.includes(element) ? element : graph.opened.includes(model.tree.parent[element]) ? model.tree.parent[element] : -1);
  const panel = new Panel(model, by("panel"), { select: (box) => select(box, true), find: (node) => find(node) });

  function select(wanted, centre = false) {
    element = wanted;
    if (model.isBox(wanted)) panel.box(wanted);
    else if (model.leaves.node[wanted] >= 0) panel.node(model.leaves.node[wanted]);
    else by("panel").replaceChildren(make("p", { class: "hint" }, "A join of control edges: it launches nothing."));
    if (centre && !model.isBox(wanted)) graph.reveal(wanted);
    graph.select(wanted);
    if (centre && model.isBox(wanted)) graph.center(wanted);
    const picked = model.isBox(wanted) ? -1 : model.leaves.node[wanted];
    for (const line of [timeline, compared]) line?.select(picked);
    buttons();
  }

  function find(node) {
    if (node < 0) return;
    const home = model.nodes.home[node];
    if (home >= 0) select(home, true);
    panel.node(node);
  }

  graph = new GraphView(model, by("canvas"), by("map"), (wanted) => select(wanted), (view) => {
    const kernels = model.leaves.node.filter((node) => node >= 0).length;
    const omitted = view.omitted ? `; ${plural(view.omitted, "lighter link")} not drawn` : "";
    by("view-state").textContent = kernels
      ? `${plural(view.shown, "box", "boxes")} for ${plural(kernels, "kernel")} of ${plural(model.count, "node")}${omitted}`
      : "No node launches a kernel.";
    if (graph) buttons();
  });
  new Search(model, by("search"), by("results"), (node) => { find(node); by("graph").scrollIntoView(); });
  legend(model);
  by("scope").hidden = !model.scope;
  by("scope").replaceChildren("Names are shown without the scope that all kernels share: ", make("code", {}, `${model.scope}/`));
  for (const named of document.querySelectorAll("[data-node]")) named.textContent = model.shortName(named.textContent);
  onThemeChange(() => { legend(model); if (element >= 0) select(element); });
  const press = (id, action) => by(id).addEventListener("click", action);
  press("zoom-in", () => graph.zoomBy(1.3));
  press("zoom-out", () => graph.zoomBy(1 / 1.3));
  press("fit", () => graph.fit());
  press("open", () => { graph.open(element); buttons(); });
  press("close", () => { const box = owner(); if (box >= 0) { graph.close(box); select(box); } });
  press("close-all", () => { graph.closeAll(); buttons(); });
  press("critical", () => {
    const shown = timeline.critical ? null : model.onCritical;
    by("critical").setAttribute("aria-pressed", `${shown !== null}`);
    graph.showCritical(shown);
    for (const line of [timeline, compared]) if (line) { line.critical = shown; line.draw(); }
  });
  press("time-in", () => timeline.zoomBy(0.7));
  press("time-out", () => timeline.zoomBy(1 / 0.7));
  press("time-fit", () => { timeline.fit(); timeline.draw(); });
  document.addEventListener("click", (event) => {
    const other = event.target.closest("[data-run]");
    if (other) { compare(Number(other.dataset.run)); by("timeline").scrollIntoView(); return; }
    const named = event.target.closest("[data-node]");
    if (!named) return;
    const node = model.index.get(named.dataset.node);
    if (node !== undefined) { find(node); by("graph").scrollIntoView(); }
  });
  if (data.roofline) {
    const drawn = () => drawRoofline(data.roofline, by("roof"));
    let width = 0;
    new ResizeObserver(([{ contentRect }]) => { if (contentRect.width !== width) { width = contentRect.width; drawn(); } }).observe(by("roof"));
    onThemeChange(drawn);
  }
  // For tests: what is drawn, and where.
  window.msplitReport = { model, graph, timeline, select, find, compare, compared: () => compared };
}

start(begin);
