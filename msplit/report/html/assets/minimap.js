// A small map of the whole graph with the part that is in view, while that is not all of it. A click or a drag goes there.

const MAP_SIZE = 200, MAP_LEAST = 36;

class Minimap {
  constructor(cy, canvas) {
    Object.assign(this, { cy, canvas, pen: canvas.getContext("2d"), waits: false });
    cy.on("viewport resize", () => this.later());
    const go = (event) => {
      if (!event.buttons) return;
      const frame = canvas.getBoundingClientRect(), { zoom, left, top } = this.place();
      const x = (event.clientX - frame.left - left) / zoom, y = (event.clientY - frame.top - top) / zoom;
      cy.pan({ x: cy.width() / 2 - x * cy.zoom(), y: cy.height() / 2 - y * cy.zoom() });
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); go(event); });
    canvas.addEventListener("pointermove", go);
  }

  // The graph is drawn many times while it moves; the map once for each frame.
  later() {
    if (!this.waits) requestAnimationFrame(() => { this.waits = false; this.draw(); });
    this.waits = true;
  }

  // From the graph's places to the map's, which has the graph's proportions.
  place() {
    const { x1, y1, w, h } = this.cy.nodes().boundingBox(), most = Math.min(MAP_SIZE, 0.4 * this.cy.width());
    const zoom = (most - 8) / Math.max(w, h, 1), width = Math.max(w * zoom + 8, MAP_LEAST), height = Math.max(h * zoom + 8, MAP_LEAST);
    return { zoom, width, height, left: (width - w * zoom) / 2 - x1 * zoom, top: (height - h * zoom) / 2 - y1 * zoom };
  }

  draw() {
    const { cy, canvas, pen } = this, seen = cy.extent(), all = cy.nodes().boundingBox(), scale = devicePixelRatio || 1;
    canvas.hidden = !cy.nodes().length || (seen.x1 <= all.x1 && seen.y1 <= all.y1 && seen.x2 >= all.x2 && seen.y2 >= all.y2);
    if (canvas.hidden) return;
    const { zoom, width, height, left, top } = this.place();
    Object.assign(canvas, { width: width * scale, height: height * scale });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    cy.nodes().forEach((node) => {
      const { x, y } = node.position(), width = Math.max(node.width() * zoom, 1.5), height = Math.max(node.height() * zoom, 1.5);
      pen.fillStyle = node.data("colours").split(" ")[0];
      pen.fillRect(x * zoom + left - width / 2, y * zoom + top - height / 2, width, height);
    });
    pen.strokeStyle = css("--accent");
    pen.lineWidth = 2;
    pen.strokeRect(seen.x1 * zoom + left, seen.y1 * zoom + top, seen.w * zoom, seen.h * zoom);
  }
}
