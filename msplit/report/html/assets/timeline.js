// The simulated step on a canvas: a row per stream, a bar per kernel, a curve per wait.

const ROW = 30, AXIS = 26, LABEL = 84, MOST_WAITS = 400;

class Timeline {
  constructor(model, host, tip, onSelect, onChange) {
    Object.assign(this, { model, host, tip, onSelect, onChange, selected: -1 });
    this.canvas = host.querySelector("canvas");
    this.pen = this.canvas.getContext("2d");
    this.row = new Map(model.lanes.map((stream, row) => [stream, row]));
    this.byLane = model.lanes.map(() => []);
    model.leaves.node.forEach((node, leaf) => { if (node >= 0) this.byLane[this.row.get(model.leaves.stream[leaf])].push(leaf); });
    for (const lane of this.byLane) lane.sort((a, b) => model.leaves.start[a] - model.leaves.start[b]);
    this.fit();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(host);
    onThemeChange(() => this.draw());
    this.resize();
  }

  fit() { this.from = 0; this.to = Math.max(this.model.makespan, 1e-3); }

  resize() {
    const scale = devicePixelRatio || 1, width = this.host.clientWidth, height = AXIS + ROW * Math.max(this.model.lanes.length, 1) + 6;
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
    const { start, time: lasts } = this.model.leaves;
    let low = 0, high = lane.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[lane[middle]] + lasts[lane[middle]] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  draw() {
    const { pen, model } = this, { start, time } = model.leaves;
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
      const y = AXIS + row * ROW + 3, fill = colour(model.lanes[row]), text = ink(fill);
      let drawn = -Infinity;
      for (let i = this.begin(lane, this.from); i < lane.length && start[lane[i]] <= this.to; i++) {
        const leaf = lane[i], left = this.x(start[leaf]), right = this.x(start[leaf] + time[leaf]);
        // Bars within the pixel of the one before would only cost time.
        if (right < drawn + 0.4) continue;
        drawn = right;
        const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.7);
        pen.fillStyle = fill;
        pen.fillRect(left, y, width, ROW - 8);
        if (leaf === this.selected) { pen.strokeStyle = css("--accent"); pen.lineWidth = 3; pen.strokeRect(left, y, width, ROW - 8); }
        if (width > 34) {
          pen.fillStyle = text;
          const name = model.label(leaf);
          pen.fillText(shorten(name, Math.floor((width - 8) / 6.4)), left + 4, y + (ROW - 8) / 2, width - 6);
        }
      }
    });
    this.curves(foreground);
    pen.restore();
    pen.fillStyle = foreground;
    model.lanes.forEach((stream, row) => pen.fillText(`stream ${stream}`, 10, AXIS + row * ROW + ROW / 2 - 1));
    if (!model.lanes.length) { pen.fillStyle = dim; pen.fillText("No node launches a kernel.", 10, AXIS + ROW / 2); }
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
    const { pen, model } = this, { start, time, stream } = model.leaves, { on, by } = model.waits, seen = [];
    for (let i = 0; i < on.length; i++) {
      const ends = start[on[i]] + time[on[i]], begins = start[by[i]];
      const mine = on[i] === this.selected || by[i] === this.selected;
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
    const { start, time } = this.model.leaves, slack = (this.to - this.from) / this.width;
    const leaf = lane[this.begin(lane, this.time(x) - slack)] ?? -1;
    return leaf >= 0 && start[leaf] - slack <= this.time(x) && this.time(x) <= start[leaf] + time[leaf] + slack ? leaf : -1;
  }

  zoomBy(factor, x = (this.width + LABEL) / 2) {
    const at = this.time(x), least = this.model.makespan / 1e5;
    const span = Math.min(Math.max((this.to - this.from) * factor, least), Math.max(this.model.makespan, 1e-3));
    const share = (at - this.from) / (this.to - this.from);
    this.move(at - share * span, span);
  }

  move(from, span) {
    const end = Math.max(this.model.makespan, 1e-3);
    this.from = Math.min(Math.max(from, 0), Math.max(end - span, 0));
    this.to = this.from + span;
    this.draw();
  }

  select(leaf) {
    this.selected = leaf;
    if (leaf >= 0) {
      const { start, time } = this.model.leaves, span = this.to - this.from;
      if (start[leaf] < this.from || start[leaf] + time[leaf] > this.to) { this.move(start[leaf] + time[leaf] / 2 - span / 2, span); return; }
    }
    this.draw();
  }

  listen() {
    let dragged = null;
    const place = (event) => { const box = this.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    this.canvas.addEventListener("wheel", (event) => {
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
      this.hover(x, y);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const [x, y] = place(event);
      if (dragged && !dragged.moved) { const leaf = this.leafAt(x, y); if (leaf >= 0) this.onSelect(leaf); }
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

  hover(x, y) {
    const leaf = this.leafAt(x, y);
    this.tip.hidden = leaf < 0;
    if (leaf < 0) return;
    const { start, time, node } = this.model.leaves;
    const { name, time: alone } = this.model.nodes, slowed = time[leaf] > 1.01 * alone[node[leaf]];
    const beside = slowed ? ` beside others, ${micros(alone[node[leaf]])} alone` : "";
    this.tip.textContent = `${name[node[leaf]]}: ${micros(time[leaf])}${beside}, from ${micros(start[leaf])}`;
    this.tip.style.left = `${Math.min(x + 12, Math.max(0, this.width - 300))}px`;
    this.tip.style.top = `${Math.min(y + 14, this.height - 30)}px`;
  }
}
