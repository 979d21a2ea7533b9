// Puts the parts together.

const MOST_RESULTS = 50;
const by = (id) => document.getElementById(id);

class Search {
  constructor(model, input, list, onPick) {
    Object.assign(this, { model, input, list, onPick, nodes: [], at: -1 });
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
    this.list.replaceChildren(...nodes.map((node, row) => this.row(node, row)));
    if (!nodes.length) this.list.append(make("li", { class: "what" }, "No node has that in its name."));
    else if (total > nodes.length) this.list.append(make("li", { class: "what" }, `and ${counted(total - nodes.length)} more`));
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.go(nodes.length ? 0 : -1);
  }

  row(node, row) {
    const { nodes } = this.model, time = nodes.time[node] > 0 ? ` · ${micros(nodes.time[node])}` : "";
    const where = nodes.host[node] ? "host" : `stream ${nodes.stream[node]}`;
    return make("li", { role: "option", id: `result-${row}`, onclick: () => this.pick(row) },
      nodes.name[node], make("div", { class: "what" }, `${nodes.ops[nodes.op[node]]} · ${where}${time}`));
  }

  go(row) {
    this.at = row;
    [...this.list.children].forEach((item, index) => item.setAttribute("aria-selected", index === row));
    if (row >= 0) { this.input.setAttribute("aria-activedescendant", `result-${row}`); this.list.children[row].scrollIntoView({ block: "nearest" }); }
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
  by("legend").replaceChildren(
    ...model.lanes.map((stream) => make("li", {}, chip(stream), ` ${micros(load.get(stream))}`)),
    ...(model.lanes.length > 1 ? [make("li", { class: "op" }, "dashed: from one stream to another")] : []));
}

async function begin() {
  const model = new Model(await unpack());
  let element = -1;
  let graph = null;
  const timeline = new Timeline(model, by("lanes"), by("tip"), (leaf) => find(model.leaves.node[leaf]), (line) => {
    by("time-state").textContent = `${micros(line.from)} to ${micros(line.to)} of ${micros(model.makespan)}`;
  });
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
    timeline.select(model.isBox(wanted) ? -1 : wanted);
    buttons();
  }

  function find(node) {
    if (node < 0) return;
    const home = model.nodes.home[node];
    if (home >= 0) select(home, true);
    panel.node(node);
  }

  graph = new GraphView(model, by("canvas"), (wanted) => select(wanted), (view) => {
    const kernels = model.leaves.node.filter((node) => node >= 0).length;
    const omitted = view.omitted ? `; ${plural(view.omitted, "lighter link")} not drawn` : "";
    by("view-state").textContent = kernels
      ? `${plural(view.shown, "box", "boxes")} for ${plural(kernels, "kernel")} of ${plural(model.count, "node")}${omitted}`
      : "No node launches a kernel.";
    if (graph) buttons();
  });
  new Search(model, by("search"), by("results"), (node) => { find(node); by("graph").scrollIntoView(); });
  legend(model);
  onThemeChange(() => { legend(model); if (element >= 0) select(element); });
  const press = (id, action) => by(id).addEventListener("click", action);
  press("zoom-in", () => graph.zoomBy(1.3));
  press("zoom-out", () => graph.zoomBy(1 / 1.3));
  press("fit", () => graph.fit());
  press("open", () => { graph.open(element); buttons(); });
  press("close", () => { const box = owner(); if (box >= 0) { graph.close(box); select(box); } });
  press("close-all", () => { graph.closeAll(); buttons(); });
  press("time-in", () => timeline.zoomBy(0.7));
  press("time-out", () => timeline.zoomBy(1 / 0.7));
  press("time-fit", () => { timeline.fit(); timeline.draw(); });
  document.addEventListener("click", (event) => {
    const named = event.target.closest("[data-node]");
    if (!named) return;
    const node = model.index.get(named.dataset.node);
    if (node !== undefined) { find(node); by("graph").scrollIntoView(); }
  });
  // For tests: what is drawn, and where.
  window.msplitReport = { model, graph, timeline, select, find };
  document.documentElement.dataset.ready = "true";
}

begin().catch((problem) => {
  const failure = by("failure");
  failure.hidden = false;
  failure.textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old to unpack the report: Chrome 80, Firefox 113, Safari 16.4 or newer can."
    : `The report could not be drawn: ${problem.message}`;
  console.error(problem);
});
