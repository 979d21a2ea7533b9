// A quick layout for views that would keep dagre busy for minutes: rows by longest path, each sorted by where its neighbours are.

const MOST_IN_ROW = 40, SWEEPS = 6;

// Row of each element by longest path over links that lead on, and how many rows the links cross on their way in all.
function rowsOf(shown, links, place) {
  const row = new Map(shown.map((element) => [element, 0]));
  for (const [a, b] of [...links].sort((one, other) => place(one[0], other[0]))) {
    if (row.get(b) <= row.get(a)) row.set(b, row.get(a) + 1);
  }
  let crossed = 0;
  for (const [a, b] of links) crossed += row.get(b) - row.get(a) - 1;
  return { row, crossed };
}

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
