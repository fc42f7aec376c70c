// What pointing at a curve says. The page is complete without it.
(() => {
  "use strict";
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  // "log 0.1 10 50 300": the numbers at the two ends of an axis, and where they are drawn.
  const scale = (text) => {
    const [kind, ...rest] = text.split(" ");
    const [low, high, first, last] = rest.map(Number);
    return (at) => {
      const share = (at - first) / (last - first);
      return kind === "log" ? low * (high / low) ** share : low + share * (high - low);
    };
  };
  const said = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };
  const known = new WeakMap();
  const points = (curve) => {
    if (!known.has(curve)) {
      const text = curve.querySelector("path")?.getAttribute("d") ?? "";
      const pairs = [...text.matchAll(/[ML] *(-?[\d.]+)[ ,]+(-?[\d.]+)/g)];
      known.set(curve, pairs.map((pair) => [Number(pair[1]), Number(pair[2])]));
    }
    return known.get(curve);
  };

  let lit = null;
  const clear = () => {
    tip.hidden = true;
    lit?.classList.remove("at");
    lit?.closest(".plot")?.classList.remove("pointing");
    lit = null;
  };
  const point = (event) => {
    const svg = event.currentTarget;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(
      svg.getScreenCTM().inverse(),
    );
    let best = null;
    for (const plot of svg.querySelectorAll(".plot")) {
      for (const curve of plot.querySelectorAll(".curve")) {
        if (getComputedStyle(curve).display === "none") continue;
        for (const [x, y] of points(curve)) {
          const far = Math.hypot(x - at.x, y - at.y);
          if (far < 18 && (!best || far < best.far)) best = { far, x, y, curve, plot };
        }
      }
    }
    clear();
    if (!best) return;
    const { x, y, curve, plot } = best;
    lit = curve;
    curve.classList.add("at");
    plot.classList.add("pointing");
    const across = said(scale(plot.dataset.x)(x));
    const along = said(scale(plot.dataset.y)(y));
    tip.textContent = `${curve.dataset.title}: ${plot.dataset.yname} ${along} `
      + `(${plot.dataset.xname} ${across})`;
    tip.hidden = false;
    const wide = document.documentElement.clientWidth;
    const left = Math.min(event.clientX + 14, wide - tip.offsetWidth - 8);
    tip.style.left = `${window.scrollX + Math.max(8, left)}px`;
    tip.style.top = `${window.scrollY + event.clientY + 18}px`;
  };

  for (const svg of document.querySelectorAll("figure svg")) {
    for (const curve of svg.querySelectorAll(".plot .curve")) {
      const title = curve.querySelector("title");
      curve.dataset.title = title?.textContent ?? "";
      title?.remove(); // or a browser would say it a second time
    }
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", clear);
  }
  window.addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
