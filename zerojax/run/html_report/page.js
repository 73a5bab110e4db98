// The values under the pointer, in every chart.
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const { series } = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg"), line = svg.querySelector(".pointer"), tip = figure.querySelector(".tip");
  const hide = () => { tip.hidden = true; line.setAttribute("hidden", ""); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const near = series.map(({ name, points }) => [name, points.reduce((best, point) =>
      Math.abs(point[1] - x) < Math.abs(best[1] - x) ? point : best)]);
    if (!near.length) return hide();
    const [step, at] = near[0][1];
    tip.textContent = [`step ${step}`, ...near.filter(([, point], i) => !i || point[0] === step)
      .map(([name, point]) => `${name} ${point[3]}`)].join(" · ");
    tip.hidden = false;
    line.removeAttribute("hidden");
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    const left = at / scale + svg.offsetLeft + (box.left - figure.getBoundingClientRect().left);
    tip.style.left = `${Math.max(8, Math.min(left + 10, figure.clientWidth - tip.offsetWidth - 8))}px`;
  });
}
