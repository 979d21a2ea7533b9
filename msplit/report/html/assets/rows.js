// What a layout needs to know beside dagre: which links decide, and a quick layout for views that would keep dagre busy for minutes.

const MOST_IN_ROW = 40, SWEEPS = 6;

// Per element the number of its strongly connected component; producers have larger numbers. Tarjan's algorithm, without recursion.
function components(shown, links) {
  const out = new Map(shown.map((element) => [element, []]));
  for (const [a, b] of links) out.get(a).push(b);
  const index = new Map(), low = new Map(), found = new Map(), stack = [];
  let next = 0, count = 0;
  for (const root of shown) {
    if (index.has(root)) continue;
    const path = [[root, 0]];
    while (path.length) {
      const top = path[path.length - 1], [element, at] = top;
      if (at === 0 && !index.has(element)) { index.set(element, next); low.set(element, next++); stack.push(element); }
      const others = out.get(element);
      if (at < others.length) {
        const other = others[at];
        top[1]++;
        if (!index.has(other)) path.push([other, 0]);
        else if (!found.has(other)) low.set(element, Math.min(low.get(element), index.get(other)));
        continue;
      }
      path.pop();
      if (path.length) { const above = path[path.length - 1][0]; low.set(above, Math.min(low.get(above), low.get(element))); }
      if (low.get(element) !== index.get(element)) continue;
      let member;
      do { member = stack.pop(); found.set(member, count); } while (member !== element);
      count++;
    }
  }
  return found;
}

// Per element its row by longest path. Lanes of several streams between two levels feed each other: such a component takes rows of its own, in
// which what is wholly before (`high` below `low`) is above, and the rest lies side by side.
//
// `mutual` says whether there is such a component, `crossed` how many rows the links cross on their way in all.
function rowsOf(shown, links, low, high) {
  const component = components(shown, links);
  const within = new Map(shown.map((element) => [element, 0]));
  const inner = links.filter(([a, b]) => component.get(a) === component.get(b));
  for (const [a, b] of inner.filter(([a, b]) => high[a] < low[b]).sort(([a], [b]) => low[a] - low[b])) {
    if (within.get(b) <= within.get(a)) within.set(b, within.get(a) + 1);
  }
  const height = new Map();
  for (const [element, at] of within) height.set(component.get(element), Math.max(height.get(component.get(element)) ?? 1, at + 1));
  const base = new Map([...height.keys()].map((number) => [number, 0]));
  const outer = links.map(([a, b]) => [component.get(a), component.get(b)]).filter(([a, b]) => a !== b).sort(([a], [b]) => b - a);
  for (const [a, b] of outer) base.set(b, Math.max(base.get(b), base.get(a) + height.get(a)));
  const row = new Map(shown.map((element) => [element, base.get(component.get(element)) + within.get(element)]));
  let crossed = 0;
  for (const [a, b] of links) crossed += Math.max(0, row.get(b) - row.get(a) - 1);
  return { row, crossed, mutual: inner.length > 0 };
}

// Rows by longest path, each sorted by where the neighbours are.
function placeInRows(shown, links, row, gapX, gapY) {
  const rows = [], near = new Map(shown.map((element) => [element, []]));
  for (const element of shown) (rows[row.get(element)] ??= []).push(element);
  for (const [a, b] of links) { near.get(a).push(b); near.get(b).push(a); }
  const x = new Map();
  const settle = (line) => line.forEach((element, at) => x.set(element, at - (line.length - 1) / 2));
  rows.forEach(settle);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    for (const line of sweep % 2 ? [...rows].reverse() : rows) {
      const wish = new Map(line.map((element) => {
        const others = near.get(element);
        return [element, others.length ? others.reduce((sum, other) => sum + x.get(other), 0) / others.length : x.get(element)];
      }));
      line.sort((a, b) => wish.get(a) - wish.get(b));
      settle(line);
    }
  }
  const positions = new Map();
  let y = 0;
  for (const line of rows) {
    // A long row goes on below itself.
    const lines = Math.ceil(line.length / MOST_IN_ROW), size = Math.ceil(line.length / lines);
    line.forEach((element, at) => {
      const from = Math.floor(at / size) * size, length = Math.min(size, line.length - from);
      positions.set(element, { x: (at - from - (length - 1) / 2) * gapX, y: y + Math.floor(at / size) * gapY });
    });
    y += lines * gapY + gapY / 3;
  }
  return positions;
}
