// The details beside the graph: of a node, or of a box.

const MOST_LISTED = 60;

class Panel {
  constructor(model, host, actions) { Object.assign(this, { model, host, actions }); }

  crumbs(element) {
    const boxes = this.model.ancestors(element).reverse();
    const parts = ["graph"];
    for (const box of boxes) parts.push(" › ", make("button", { class: "node", onclick: () => this.actions.select(box) }, shorten(this.model.label(box), 30)));
    return make("p", { class: "crumbs" }, ...parts);
  }

  fact(name, ...value) { return [make("dt", {}, name), make("dd", {}, ...value)]; }

  link(node, note = "") {
    const { nodes } = this.model;
    const button = make("button", { class: "node", onclick: () => this.actions.find(node) }, this.model.shortName(nodes.name[node]));
    return make("li", {}, button, make("span", { class: "op" }, ` ${nodes.ops[nodes.op[node]]}${note}`));
  }

  list(title, entries, draw) {
    if (!entries.length) return [];
    const list = make("ul", {});
    const grow = (from) => {
      entries.slice(from, from + MOST_LISTED).forEach((entry) => list.append(draw(entry)));
      const left = entries.length - from - MOST_LISTED;
      if (left > 0) {
        const more = make("li", {}, make("button", { onclick: () => { more.remove(); grow(from + MOST_LISTED); } }, `${counted(left)} more`));
        list.append(more);
      }
    };
    grow(0);
    return [make("h4", {}, `${title} (${counted(entries.length)})`), list];
  }

  ends(edges, side) {
    const seen = new Map();
    for (const edge of edges) {
      const node = this.model.edges[side][edge], control = this.model.control.has(edge);
      seen.set(node, (seen.get(node) ?? true) && control);
    }
    return [...seen];
  }

  node(node) {
    const { nodes } = this.model, home = nodes.home[node], reason = this.model.reason(node);
    const name = this.model.shortName(nodes.name[node]), facts = [this.fact("op", nodes.ops[nodes.op[node]])];
    if (nodes.host[node]) facts.push(this.fact("stream", "none: it runs on the CPU"));
    else facts.push(this.fact("stream", chip(nodes.stream[node])));
    if (reason) facts.push(this.fact("rule", reason[0]), this.fact("why", reason[1]));
    else facts.push(this.fact("rule", this.model.reasons.length ? "none: the default stream" : "the id is on the graph"));
    const results = nodes.results[nodes.result[node]];
    if (results) facts.push(this.fact("gives", ...results.split("; ").flatMap((line) => [make("span", { class: "tensor" }, line), " "])));
    if (this.model.onCritical.has(node)) facts.push(this.fact("path", "on the critical path"));
    if (nodes.time[node] > 0) {
      facts.push(this.fact("cost", `${micros(nodes.time[node])}${nodes.known[node] ? "" : " (a guess: unknown shape)"}`));
      facts.push(this.fact("work", `${operations(nodes.flops[node])}, ${size(nodes.bytes[node])} moved`));
      facts.push(this.fact("fills", `${+(100 * nodes.share[node]).toPrecision(2)} % of the GPU`));
    } else facts.push(this.fact("cost", "launches no kernel"));
    const draw = ([other, control]) => this.link(other, control ? " · control" : "");
    if (name !== nodes.name[node]) facts.push(this.fact("full name", nodes.name[node]));
    this.host.replaceChildren(
      ...(home >= 0 ? [this.crumbs(home)] : []),
      make("h3", { id: "selected-name" }, name),
      make("dl", { class: "facts" }, ...facts.flat()),
      ...this.list("Inputs", this.ends(this.model.into.of(node), "src"), draw),
      ...this.list("Consumers", this.ends(this.model.outOf.of(node), "dst"), draw),
    );
    this.host.scrollTop = 0;
  }

  box(element) {
    const model = this.model;
    const what = {
      chain: "kernels one after the other", alike: "boxes with the same inputs and the same consumers",
      part: "what one stream does between two levels of the graph", piece: "neighbours, cut off so that a view is not too large",
    }[model.kind(element)];
    const shares = [...model.shares[element]].sort((a, b) => b[1] - a[1]);
    const streams = make("dd", {}, ...shares.flatMap(([stream, time]) => [chip(stream), ` ${micros(time)} `]));
    const leaves = model.leavesIn(element).filter((leaf) => model.leaves.node[leaf] >= 0);
    const others = leaves.flatMap((leaf) => [...model.at.of(leaf)]).filter((node) => !(model.nodes.time[node] > 0));
    const inside = [...model.inside.of(element)];
    this.host.replaceChildren(
      this.crumbs(element),
      make("h3", { id: "selected-name" }, model.label(element)),
      make("dl", { class: "facts" },
        ...this.fact("box", what), ...this.fact("kernels", counted(model.kernels[element])),
        ...this.fact("cost", micros(model.time[element])), make("dt", {}, shares.length > 1 ? "streams" : "stream"), streams),
      ...(model.kind(element) === "chain" ? [] : this.list("Inside", inside, (child) => make("li", {},
        make("button", { class: "node", onclick: () => this.actions.select(child) }, model.label(child)),
        make("span", { class: "op" }, ` ${plural(model.kernels[child], "kernel")}, ${micros(model.time[child])}`)))),
      ...this.list("Kernels", leaves, (leaf) => this.link(model.leaves.node[leaf], ` · ${micros(model.time[leaf])}`)),
      ...this.list("Nodes without a kernel", others, (node) => this.link(node)),
    );
    this.host.scrollTop = 0;
  }
}
