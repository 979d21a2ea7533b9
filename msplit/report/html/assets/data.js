// The columns of the page as a model: who is inside of whom, who feeds whom, what each box amounts to.

// Groups 0..count-1 by key: the items of key k are items[start[k]] .. items[start[k + 1] - 1], in their order.
function grouped(keys, count) {
  const start = new Int32Array(count + 1);
  for (const key of keys) if (key >= 0) start[key + 1]++;
  for (let k = 0; k < count; k++) start[k + 1] += start[k];
  const items = new Int32Array(start[count]);
  const next = start.slice();
  keys.forEach((key, item) => { if (key >= 0) items[next[key]++] = item; });
  return { start, items, of: (key) => items.subarray(start[key], start[key + 1]) };
}

class Model {
  constructor(data) {
    Object.assign(this, data);
    this.count = this.nodes.name.length;
    this.leafCount = this.leaves.node.length;
    this.elements = this.tree.parent.length;
    this.inside = grouped(this.tree.parent, this.elements);
    this.top = [];
    this.tree.parent.forEach((box, element) => { if (box < 0) this.top.push(element); });
    this.into = grouped(this.edges.dst, this.count);
    this.outOf = grouped(this.edges.src, this.count);
    this.control = new Set(this.edges.control);
    this.at = grouped(this.nodes.home, this.leafCount);
    this.index = new Map();
    this.nodes.name.forEach((name, node) => { if (!this.index.has(name)) this.index.set(name, node); });
    this.lower = this.nodes.name.map((name) => name.toLowerCase());
    this.onCritical = new Set(this.critical);
    this.weigh();
    this.rank();
  }

  // Elements so that what is inside of a box comes after it.
  outsideIn() {
    const order = [...this.top];
    for (let i = 0; i < order.length; i++) for (const element of this.inside.of(order[i])) order.push(element);
    return order;
  }

  weigh() {
    const parent = this.tree.parent;
    this.kernels = new Int32Array(this.elements);
    this.time = new Float64Array(this.elements);
    this.shares = new Array(this.elements);
    this.prefix = new Array(this.elements);
    this.first = new Int32Array(this.elements).fill(-1);
    const order = this.outsideIn();
    for (let i = order.length - 1; i >= 0; i--) {
      const element = order[i];
      if (element < this.leafCount) {
        const node = this.leaves.node[element];
        this.shares[element] = new Map();
        if (node >= 0) {
          this.kernels[element] = 1;
          this.time[element] = this.nodes.time[node];
          this.shares[element].set(this.leaves.stream[element], this.time[element]);
          this.prefix[element] = this.nodes.name[node];
          this.first[element] = node;
        }
      }
      const box = parent[element];
      if (box < 0) continue;
      this.kernels[box] += this.kernels[element];
      this.time[box] += this.time[element];
      this.shares[box] ??= new Map();
      for (const [stream, time] of this.shares[element]) this.shares[box].set(stream, (this.shares[box].get(stream) ?? 0) + time);
      if (this.prefix[element] === undefined) continue;
      this.prefix[box] = this.prefix[box] === undefined ? this.prefix[element] : common(this.prefix[box], this.prefix[element]);
      // Elements come in backwards: the last one seen is the first inside of the box.
      this.first[box] = this.first[element];
    }
    const prefixes = this.top.map((element) => this.prefix[element]).filter((prefix) => prefix !== undefined);
    const shared = prefixes.length ? prefixes.reduce(common) : "";
    // A kernel may have the name of the scope itself.
    const path = this.index.has(shared) ? shared.slice(0, Math.max(shared.lastIndexOf("/"), 0)) : shared;
    this.scope = this.leaves.node.filter((node) => node >= 0).length > 1 ? path : "";
  }

  // Per leaf the longest way to it, in links; per box the least and the most of its leaves. Links come sorted by consumer, and leaves in an
  // order in which producers come first, so that one pass is enough.
  rank() {
    const { src, dst } = this.links;
    this.low = new Int32Array(this.elements);
    for (let i = 0; i < src.length; i++) this.low[dst[i]] = Math.max(this.low[dst[i]], this.low[src[i]] + 1);
    this.high = this.low.slice();
    this.low.fill(this.leafCount, this.leafCount);
    const order = this.outsideIn();
    for (let i = order.length - 1; i >= 0; i--) {
      const element = order[i], box = this.tree.parent[element];
      if (box < 0) continue;
      this.low[box] = Math.min(this.low[box], this.low[element]);
      this.high[box] = Math.max(this.high[box], this.high[element]);
    }
  }

  isBox(element) { return element >= this.leafCount; }

  name(element) {
    if (!this.isBox(element)) return this.leaves.node[element] < 0 ? "join of control edges" : this.nodes.name[this.leaves.node[element]];
    const prefix = this.prefix[element] ?? "";
    return prefix.length > this.scope.length ? prefix : `${this.nodes.name[this.first[element]] ?? "join"} …`;
  }

  // The run of the ids of this page: its bars are the leaves.
  ownRun() {
    return { ...this.leaves, on: this.waits.on, by: this.waits.by, lanes: this.lanes, makespan: this.makespan, label: [], about: this.about, command: this.command };
  }

  // The name without the scope that all kernels share.
  label(element) { return this.shortName(this.name(element)); }

  shortName(name) {
    return this.scope && name.startsWith(`${this.scope}/`) ? name.slice(this.scope.length + 1) : name;
  }

  kind(element) { return this.tree.kinds[this.tree.kind[element - this.leafCount]]; }

  ancestors(element) {
    const found = [];
    for (let box = this.tree.parent[element]; box >= 0; box = this.tree.parent[box]) found.push(box);
    return found;
  }

  reason(node) {
    const index = this.nodes.reason[node] ?? -1;
    return index >= 0 ? this.reasons[index] : null;
  }

  leavesIn(element) {
    const found = [];
    const waiting = [element];
    while (waiting.length) {
      const next = waiting.pop();
      if (this.isBox(next)) waiting.push(...[...this.inside.of(next)].reverse());
      else found.push(next);
    }
    return found;
  }

  // Nodes that a text finds, the best first.
  search(text, most) {
    const stream = /^stream:(\d+)$/i.exec(text);
    const op = /^op:(.+)$/i.exec(text);
    const wanted = (op ? op[1] : text).toLowerCase();
    const found = [];
    for (let node = 0; node < this.count; node++) {
      let rank = -1;
      if (stream) rank = this.nodes.stream[node] === Number(stream[1]) && !this.nodes.host[node] ? 1 : -1;
      else if (op) rank = this.nodes.ops[this.nodes.op[node]].toLowerCase() === wanted ? 1 : -1;
      else {
        const name = this.lower[node];
        const at = name.indexOf(wanted);
        if (at >= 0) rank = name.length === wanted.length ? 4 : name.endsWith(wanted) ? 3 : at === 0 || name[at - 1] === "/" ? 2 : 1;
      }
      if (rank >= 0) found.push([rank + (this.nodes.time[node] > 0 ? 0.5 : 0), node]);
    }
    found.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    return { total: found.length, nodes: found.slice(0, most).map((pair) => pair[1]) };
  }
}

// What two names have in common, up to a slash.
function common(a, b) {
  if (a === b) return a;
  const left = a.split("/"), right = b.split("/");
  let same = 0;
  while (same < left.length && same < right.length && left[same] === right[same]) same++;
  return left.slice(0, same).join("/");
}
