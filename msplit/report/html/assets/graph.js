// The graph: which boxes are open, and how what is visible is drawn.

const MOST_VISIBLE = 1500;
const MOST_LINKS = 4000, MOST_FOR_DAGRE = 2000;
const WIDTH = 204, HEIGHT = 62, LINE = 15, CHARACTERS = 26, BESIDE = 18, BETWEEN = 42;
const FONT = 12, READABLE = 11 / FONT, LARGEST = 1.2;  // zooms: labels are 11 px; a small graph need not fill the frame

class GraphView {
  constructor(model, host, map, onSelect, onChange) {
    this.model = model;
    this.host = host;
    this.onChange = onChange;
    this.opened = [];
    this.selected = -1;
    // Before Cytoscape sees it: the wheel is the page's unless a key is held.
    host.addEventListener("wheel", (event) => { if (!zooms(event)) event.stopImmediatePropagation(); }, { capture: true, passive: true });
    this.cy = cytoscape({ container: host, style: this.style(), minZoom: 0.02, maxZoom: 3, boxSelectionEnabled: false });
    this.map = new Minimap(this.cy, map);
    this.cy.on("tap", "node", (event) => onSelect(Number(event.target.id())));
    this.cy.on("dbltap", "node", (event) => this.open(Number(event.target.id())));
    onThemeChange(() => { this.cy.style(this.style()); this.cy.nodes().forEach((node) => { node.data(this.look(Number(node.id()))); }); this.map.draw(); });
    this.draw();
  }

  // Per leaf the element that stands for it.
  visible() {
    const model = this.model, open = new Set(this.opened), shown = [], stands = new Int32Array(model.leafCount);
    const waiting = [...model.top].reverse();
    while (waiting.length) {
      const element = waiting.pop();
      if (open.has(element)) { waiting.push(...[...model.inside.of(element)].reverse()); continue; }
      shown.push(element);
      for (const leaf of model.leavesIn(element)) stands[leaf] = element;
    }
    return { shown, stands };
  }

  countVisible(open) {
    const waiting = [...this.model.top];
    let count = 0;
    while (waiting.length) {
      const element = waiting.pop();
      if (open.has(element)) waiting.push(...this.model.inside.of(element));
      else count++;
    }
    return count;
  }

  // Links between visible elements: [from, to, how many, whether one crosses streams]; and those that are worth drawing.
  links(stands) {
    const model = this.model, { src, dst } = model.links, { stream } = model.leaves, found = new Map();
    for (let i = 0; i < src.length; i++) {
      const a = stands[src[i]], b = stands[dst[i]];
      if (a === b) continue;
      const crosses = stream[src[i]] !== stream[dst[i]] && stream[src[i]] >= 0 && stream[dst[i]] >= 0;
      const key = a * model.elements + b, link = found.get(key);
      if (link) { link[2]++; link[3] ||= crosses; } else found.set(key, [a, b, 1, crosses]);
    }
    const links = [...found.values()];
    if (links.length <= MOST_LINKS) return { links, drawn: links };
    // A single dependency is everything to a kernel and nothing to a box of thousands.
    const weight = ([a, b, many]) => many / Math.max(1, Math.min(model.kernels[a], model.kernels[b]));
    links.sort((one, other) => weight(other) - weight(one));
    return { links, drawn: links.slice(0, MOST_LINKS) };
  }

  // dagre draws best, but it knows nothing of boxes that feed each other, and large views would keep it busy for minutes.
  arrange(shown, links) {
    const { row, crossed, mutual } = rowsOf(shown, links, this.model.low, this.model.high);
    this.across = this.runsAcross(row);
    if (mutual || shown.length + crossed > MOST_FOR_DAGRE || links.length > MOST_FOR_DAGRE) {
      const positions = placeInRows(shown, links, row, BESIDE + (this.across ? HEIGHT : WIDTH), BETWEEN + (this.across ? WIDTH : HEIGHT));
      const turned = ({ x, y }) => (this.across ? { x: y, y: x } : { x, y });
      this.cy.layout({ name: "preset", positions: (node) => turned(positions.get(Number(node.id()))), fit: false }).run();
    } else this.cy.layout({ name: "dagre", rankDir: this.across ? "LR" : "TB", nodeSep: BESIDE, edgeSep: 8, rankSep: BETWEEN, fit: false }).run();
  }

  // Whether rows stand side by side, from left to right: where that shows the graph larger. Boxes are wide, so wide graphs become tall.
  runsAcross(row) {
    const lengths = [];
    for (const at of row.values()) lengths[at] = (lengths[at] ?? 0) + 1;
    const widest = Math.min(Math.max(...lengths), MOST_IN_ROW), rows = lengths.reduce((sum, length) => sum + Math.ceil(length / MOST_IN_ROW), 0);
    const zoom = (across, down) => Math.min(this.cy.width() / across, this.cy.height() / down, LARGEST);
    return zoom(rows * (WIDTH + BETWEEN), widest * (HEIGHT + BESIDE)) > zoom(widest * (WIDTH + BESIDE), rows * (HEIGHT + BETWEEN));
  }

  look(element) {
    const model = this.model;
    const shares = [...model.shares[element]].sort((a, b) => a[0] - b[0]);
    const total = shares.reduce((sum, pair) => sum + pair[1], 0) || 1;
    const colours = [], stops = [];
    let at = 0;
    for (const [stream, time] of shares) {
      colours.push(colour(stream), colour(stream));
      stops.push(`${(100 * at).toFixed(1)}%`, `${(100 * (at += time / total)).toFixed(1)}%`);
    }
    if (!colours.length) { colours.push(css("--edge"), css("--edge")); stops.push("0%", "100%"); }
    const mixed = shares.length > 1;
    const streams = mixed ? `${shares.length} str.` : shares.length ? `s${shares[0][0]}` : "";
    const lines = folded(model.label(element), CHARACTERS);
    const amount = model.isBox(element) ? `${plural(model.kernels[element], "kernel")} · ` : "";
    return {
      height: HEIGHT - (2 - lines.length) * LINE, label: model.kernels[element] ? `${lines.join("\n")}\n${amount}${micros(model.time[element])} · ${streams}` : "",
      colours: colours.join(" "), stops: stops.join(" "), ink: mixed ? css("--fg") : ink(colours[0]), plate: mixed ? 0.85 : 0,
    };
  }

  style() {
    return [
      { selector: "node", style: {
        shape: "round-rectangle", width: WIDTH, height: "data(height)", label: "data(label)", color: "data(ink)", "font-size": FONT,
        "font-family": "system-ui, sans-serif", "text-wrap": "wrap", "text-valign": "center",
        "text-max-width": WIDTH - 10, "line-height": 1.25, "background-fill": "linear-gradient", "background-gradient-direction": "to-right",
        "background-gradient-stop-colors": "data(colours)", "background-gradient-stop-positions": "data(stops)",
        "text-background-color": css("--bg"), "text-background-opacity": "data(plate)", "text-background-padding": 2,
        "text-background-shape": "round-rectangle", "border-width": 1, "border-color": css("--line"), "min-zoomed-font-size": 5,
      } },
      { selector: "node.box", style: { "border-width": 4, "border-style": "double", "border-color": css("--fg") } },
      { selector: "node.joint", style: { shape: "ellipse", width: 14, height: 14 } },
      { selector: "node.critical", style: { "underlay-color": css("--bad"), "underlay-opacity": 0.9, "underlay-padding": 7, "underlay-shape": "round-rectangle" } },
      { selector: "edge.critical", style: { "line-color": css("--bad"), "target-arrow-color": css("--bad"), width: 3.5 } },
      { selector: "node.selected", style: { "outline-width": 5, "outline-color": css("--accent"), "outline-offset": 3 } },
      { selector: "edge", style: {
        width: 1.5, "line-color": css("--edge"), "target-arrow-color": css("--edge"), "target-arrow-shape": "triangle", "curve-style": "bezier",
        "arrow-scale": 0.9 } },
      { selector: "edge.onward", style: this.across ? { "source-endpoint": "90deg", "target-endpoint": "270deg" } : { "source-endpoint": "180deg", "target-endpoint": "0deg" } },
      { selector: "edge.cross", style: {
        width: 2.5, "line-style": "dashed", "line-color": css("--cross"), "target-arrow-color": css("--cross") } },
      { selector: "edge.near", style: { "line-color": css("--accent"), "target-arrow-color": css("--accent"), width: 3.5, "z-index": 9 } },
    ];
  }

  draw() {
    const { shown, stands } = this.visible();
    const { links, drawn } = this.links(stands);
    this.stands = stands;
    this.shown = shown.length;
    this.omitted = links.length - drawn.length;
    this.cy.elements().remove();
    this.cy.add(shown.map((element) => ({
      group: "nodes", data: { id: `${element}`, ...this.look(element) },
      classes: this.model.isBox(element) ? "box" : this.model.kernels[element] ? "" : "joint",
    })));
    this.cy.add(drawn.map((link) => ({
      group: "edges", data: { id: `${link[0]}-${link[1]}`, source: `${link[0]}`, target: `${link[1]}` }, classes: link[3] ? "cross" : "",
    })));
    this.arrange(shown, links);
    const along = this.across ? "x" : "y";
    this.cy.edges().forEach((edge) => { edge.toggleClass("onward", edge.target().position(along) > edge.source().position(along)); });
    this.cy.style(this.style());
    this.begin();
    this.mark();
    this.onChange(this);
  }

  // What is seen at first: all of it if it can be read then, else its beginning.
  begin() {
    this.fit();
    if (this.cy.zoom() >= READABLE || !this.shown) return;
    this.cy.zoom(READABLE);
    const { x1, y1, w, h } = this.cy.nodes().boundingBox(), along = this.across ? "x" : "y", beside = this.across ? "y" : "x";
    const first = this.cy.nodes().min((node) => node.position(along) + node.position(beside) / 1e6).ele.position(beside);
    const pan = (size, from, length, wanted) => {
      const room = size - 40 - length * READABLE;
      return 20 - from * READABLE + (room >= 0 ? room / 2 : Math.max(room, Math.min(0, size / 2 - 20 - (wanted - from) * READABLE)));
    };
    this.cy.pan({ x: pan(this.cy.width(), x1, w, this.across ? x1 : first), y: pan(this.cy.height(), y1, h, this.across ? first : y1) });
  }

  mark() {
    this.cy.elements().removeClass("selected near critical");
    if (this.critical) {
      const on = new Set();
      for (const node of this.critical) on.add(`${this.standing(this.model.nodes.home[node])}`);
      this.cy.nodes().forEach((node) => { if (on.has(node.id())) node.addClass("critical"); });
      this.cy.edges().forEach((edge) => { if (on.has(edge.data("source")) && on.has(edge.data("target"))) edge.addClass("critical"); });
    }
    if (this.selected < 0) return;
    const standing = this.cy.getElementById(`${this.standing(this.selected)}`);
    standing.addClass("selected");
    standing.connectedEdges().addClass("near");
  }

  // The visible element that an element is in; itself if it is visible, -1 if it is open.
  standing(element) {
    if (!this.model.isBox(element)) return this.stands[element];
    const open = new Set(this.opened);
    if (open.has(element)) return -1;
    let found = element;
    for (const box of this.model.ancestors(element)) if (!open.has(box)) found = box;
    return found;
  }

  select(element) { this.selected = element; this.mark(); }

  // Marks the boxes that these nodes are in, or none.
  showCritical(nodes) { this.critical = nodes; this.mark(); }

  center(element) {
    const node = this.cy.getElementById(`${this.standing(element)}`);
    if (!node.length) return;
    if (this.cy.zoom() < READABLE) this.cy.zoom(READABLE);
    this.cy.center(node);
  }

  open(element) {
    if (!this.model.isBox(element) || this.opened.includes(element)) return;
    this.opened.push(element);
    this.makeRoom(element);
    this.draw();
    const inside = [...this.model.inside.of(element)].map((child) => this.cy.getElementById(`${child}`)).filter((node) => node.length);
    this.show(inside);
  }

  // Opens everything around an element, so that it is visible itself.
  reveal(element) {
    const closed = this.model.ancestors(element).filter((box) => !this.opened.includes(box)).reverse();
    if (closed.length) {
      this.opened.push(...closed);
      this.makeRoom(element);
      this.draw();
    }
    this.center(element);
  }

  // Closes what was opened first, until there is not too much to see.
  makeRoom(element) {
    const needed = new Set([element, ...this.model.ancestors(element)]), open = new Set(this.opened);
    for (const box of this.opened) {
      if (this.countVisible(open) <= MOST_VISIBLE) break;
      if (!needed.has(box)) open.delete(box);
    }
    this.opened = this.opened.filter((box) => open.has(box) && this.model.ancestors(box).every((around) => open.has(around)));
  }

  closeWithInside(box) {
    this.opened = this.opened.filter((other) => other !== box && !this.model.ancestors(other).includes(box));
  }

  close(box) {
    this.closeWithInside(box);
    this.draw();
    this.center(box);
  }

  closeAll() { this.opened = []; this.draw(); }

  show(nodes) {
    if (!nodes.length) return;
    const group = this.cy.collection(nodes);
    this.cy.fit(group, 40);
    if (this.cy.zoom() > LARGEST) { this.cy.zoom(LARGEST); this.cy.center(group); }
    if (this.cy.zoom() < READABLE) { this.cy.zoom(READABLE); this.cy.center(nodes[0]); }
  }

  zoomBy(factor) {
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: { x: this.cy.width() / 2, y: this.cy.height() / 2 } });
  }

  fit() {
    this.cy.fit(undefined, 20);
    if (this.cy.zoom() > LARGEST) { this.cy.zoom(LARGEST); this.cy.center(); }
  }
}
