// A step on a canvas: a row per stream, a bar per kernel, a curve per wait. A run has `node`, `stream`, `start` and `time` per bar, `on` and `by`
// per wait, its `lanes`, its `makespan`, and a `label` per bar where that is no node's name.

const ROW = 30, AXIS = 26, LABEL = 84, MOST_WAITS = 400;

class Timeline {
  constructor(model, host, tip, onSelect, onChange) {
    Object.assign(this, { model, host, tip, onSelect, onChange, selected: -1, extent: 0, critical: null });
    this.canvas = host.querySelector("canvas");
    this.pen = this.canvas.getContext("2d");
    this.listen();
    this.take(model.ownRun());
    new ResizeObserver(() => this.resize()).observe(host);
    onThemeChange(() => this.draw());
  }

  // Shows a run. `extent` is how long the longest of all that are shown takes, so that what is compared has one scale.
  take(run, extent = run.makespan) {
    this.run = run;
    this.row = new Map(run.lanes.map((stream, row) => [stream, row]));
    this.byLane = run.lanes.map(() => []);
    run.stream.forEach((stream, bar) => { if (stream >= 0) this.byLane[this.row.get(stream)].push(bar); });
    for (const lane of this.byLane) lane.sort((a, b) => run.start[a] - run.start[b]);
    this.extent = Math.max(extent, 1e-3);
    this.fit();
    this.resize();
  }

  fit() { this.from = 0; this.to = this.extent; }

  label(bar) {
    const node = this.run.node[bar];
    return this.run.label.length ? this.run.label[bar] : this.model.shortName(this.model.nodes.name[node]);
  }

  resize() {
    const scale = devicePixelRatio || 1, width = this.host.clientWidth, height = AXIS + ROW * Math.max(this.run.lanes.length, 1) + 6;
    this.width = width;
    this.height = height;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.draw();
  }

  x(time) { return LABEL + (time - this.from) / (this.to - this.from) * (this.width - LABEL - 8); }
  time(x) { return this.from + (x - LABEL) / (this.width - LABEL - 8) * (this.to - this.from); }

  // The first bar of a lane that ends after a time.
  begin(lane, time) {
    const { start, time: lasts } = this.run;
    let low = 0, high = lane.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[lane[middle]] + lasts[lane[middle]] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  draw() {
    const { pen, run } = this, { start, time, node } = run;
    const foreground = css("--fg"), dim = css("--dim"), line = css("--line");
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = "12px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    this.axis(dim, line);
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, this.width - LABEL, this.height);
    pen.clip();
    this.byLane.forEach((lane, row) => {
      const y = AXIS + row * ROW + 3, fill = colour(run.lanes[row]), text = ink(fill);
      let drawn = -Infinity;
      for (let i = this.begin(lane, this.from); i < lane.length && start[lane[i]] <= this.to; i++) {
        const leaf = lane[i], left = this.x(start[leaf]), right = this.x(start[leaf] + time[leaf]);
        // Bars within the pixel of the one before would only cost time.
        if (right < drawn + 0.4) continue;
        drawn = right;
        const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.7);
        pen.fillStyle = fill;
        pen.fillRect(left, y, width, ROW - 8);
        if (this.critical?.has(node[leaf])) { pen.fillStyle = css("--bad"); pen.fillRect(left, y + ROW - 8, width, 4); }
        if (node[leaf] >= 0 && node[leaf] === this.selected) { pen.strokeStyle = css("--accent"); pen.lineWidth = 3; pen.strokeRect(left, y, width, ROW - 8); }
        if (width > 56) {
          pen.fillStyle = text;
          const name = this.label(leaf);
          pen.fillText(shorten(name, Math.floor((width - 8) / 6.4)), left + 4, y + (ROW - 8) / 2, width - 6);
        }
      }
    });
    this.curves(foreground);
    pen.restore();
    pen.fillStyle = foreground;
    run.lanes.forEach((stream, row) => pen.fillText(`stream ${stream}`, 10, AXIS + row * ROW + ROW / 2 - 1));
    if (!run.lanes.length) { pen.fillStyle = dim; pen.fillText("No node launches a kernel.", 10, AXIS + ROW / 2); }
    this.onChange(this);
  }

  axis(dim, line) {
    const { pen } = this;
    const rough = (this.to - this.from) / Math.max(2, (this.width - LABEL) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      const x = this.x(tick);
      pen.fillStyle = line;
      pen.fillRect(x, AXIS - 4, 1, this.height);
      pen.fillStyle = dim;
      const text = micros(+tick.toPrecision(6));
      if (x + 3 + pen.measureText(text).width < this.width) pen.fillText(text, x + 3, 12);  // half a number is none
    }
  }

  curves(stroke) {
    const { pen } = this, { start, time, stream, node, on, by } = this.run, seen = [];
    for (let i = 0; i < on.length; i++) {
      const ends = start[on[i]] + time[on[i]], begins = start[by[i]];
      const mine = this.selected >= 0 && (node[on[i]] === this.selected || node[by[i]] === this.selected);
      if (begins < this.from || ends > this.to) continue;
      if (mine || seen.length < MOST_WAITS) seen.push([i, ends, begins, mine]);
    }
    const many = seen.length >= MOST_WAITS;
    for (const [i, ends, begins, mine] of seen) {
      if (many && !mine) continue;
      const middle = (leaf) => AXIS + this.row.get(stream[leaf]) * ROW + ROW / 2 - 1;
      const x1 = this.x(ends), x2 = this.x(begins), y1 = middle(on[i]), y2 = middle(by[i]), bend = Math.max(14, (x2 - x1) / 2);
      pen.strokeStyle = mine ? css("--accent") : stroke;
      pen.globalAlpha = mine ? 1 : 0.55;
      pen.lineWidth = mine ? 2 : 1;
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x2, y2); pen.lineTo(x2 - 6, y2 - 3); pen.lineTo(x2 - 6, y2 + 3);
      pen.fillStyle = pen.strokeStyle;
      pen.fill();
      pen.globalAlpha = 1;
    }
  }

  leafAt(x, y) {
    const row = Math.floor((y - AXIS) / ROW), lane = this.byLane[row];
    if (!lane || x < LABEL) return -1;
    const { start, time } = this.run, slack = (this.to - this.from) / this.width;
    const leaf = lane[this.begin(lane, this.time(x) - slack)] ?? -1;
    return leaf >= 0 && start[leaf] - slack <= this.time(x) && this.time(x) <= start[leaf] + time[leaf] + slack ? leaf : -1;
  }

  zoomBy(factor, x = (this.width + LABEL) / 2) {
    const at = this.time(x), least = this.extent / 1e5;
    const span = Math.min(Math.max((this.to - this.from) * factor, least), this.extent);
    const share = (at - this.from) / (this.to - this.from);
    this.move(at - share * span, span);
  }

  move(from, span) {
    this.from = Math.min(Math.max(from, 0), Math.max(this.extent - span, 0));
    this.to = this.from + span;
    this.draw();
  }

  // Selects a node, and moves to its bar.
  select(node) {
    this.selected = node;
    const bar = node < 0 ? -1 : this.run.node.indexOf(node);
    if (bar >= 0) {
      const { start, time } = this.run, span = this.to - this.from;
      if (start[bar] < this.from || start[bar] + time[bar] > this.to) { this.move(start[bar] + time[bar] / 2 - span / 2, span); return; }
    }
    this.draw();
  }

  listen() {
    let dragged = null;
    const place = (event) => { const box = this.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    this.canvas.addEventListener("wheel", (event) => {
      if (!zooms(event)) return;  // the page scrolls
      event.preventDefault();
      this.zoomBy(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 120) / 400), place(event)[0]);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      dragged = { x: place(event)[0], from: this.from, moved: false };
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (dragged) {
        if (Math.abs(x - dragged.x) > 3) dragged.moved = true;
        if (dragged.moved) this.move(dragged.from - (x - dragged.x) / (this.width - LABEL - 8) * (this.to - this.from), this.to - this.from);
        return;
      }
      this.hover(x, y, event);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const [x, y] = place(event);
      if (dragged && !dragged.moved) { const leaf = this.leafAt(x, y); if (leaf >= 0 && this.run.node[leaf] >= 0) this.onSelect(this.run.node[leaf]); }
      dragged = null;
    });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => {
      const span = this.to - this.from;
      if (event.key === "ArrowLeft") this.move(this.from - span / 8, span);
      else if (event.key === "ArrowRight") this.move(this.from + span / 8, span);
      else if (event.key === "+" || event.key === "=") this.zoomBy(0.7);
      else if (event.key === "-") this.zoomBy(1 / 0.7);
      else return;
      event.preventDefault();
    });
  }

  hover(x, y, event) {
    const bar = this.leafAt(x, y);
    this.tip.hidden = bar < 0;
    if (bar < 0) return;
    const { start, time, node, label } = this.run;
    const alone = label.length ? time[bar] : this.model.nodes.time[node[bar]], slowed = time[bar] > 1.01 * alone;
    const beside = slowed ? ` beside others, ${micros(alone)} alone` : "";
    this.tip.textContent = `${this.label(bar)}: ${micros(time[bar])}${beside}, from ${micros(start[bar])}`;
    // Beside the pointer, wherever there is room for all of it.
    const { width, height } = this.tip.getBoundingClientRect(), edge = document.documentElement;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, edge.clientWidth - width - 4))}px`;
    const below = event.clientY + 16;
    this.tip.style.top = `${Math.max(4, below + height + 4 <= innerHeight ? below : event.clientY - height - 10)}px`;
  }
}
