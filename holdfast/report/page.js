// The legend hides and shows a line everywhere on the page; a pointer over a chart reads the values of a round.
"use strict";
const tip = document.getElementById("tip");
const data = JSON.parse(document.getElementById("data").textContent);

for (const key of document.querySelectorAll(".key")) {
  key.addEventListener("click", () => {
    const shown = key.getAttribute("aria-pressed") !== "true";
    for (const twin of document.querySelectorAll(`.key[data-key="${key.dataset.key}"]`)) twin.setAttribute("aria-pressed", String(shown));
    for (const part of document.querySelectorAll(`svg [data-line="${key.dataset.key}"]`)) part.classList.toggle("off", !shown);
  });
}

for (const chart of document.querySelectorAll("svg[data-x]")) {
  const [left, right, first, last] = chart.dataset.x.split(",").map(Number);
  const cursor = chart.querySelector(".cursor");
  const series = data[chart.closest("[data-chart]").dataset.chart];
  const percent = chart.dataset.percent === "1";
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    if (point.x < left - 8 || point.x > right + 8) return hide();
    const wanted = first + ((point.x - left) / (right - left)) * (last - first);
    const rounds = [...new Set(series.flatMap((s) => s.rounds))];
    const round = rounds.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a), rounds[0]);
    const at = left + ((round - first) / Math.max(last - first, 1)) * (right - left);
    cursor.setAttribute("transform", `translate(${at} 0)`);
    cursor.setAttribute("visibility", "visible");
    show(event, round, series, percent, chart);
  });
}

function show(event, round, series, percent, chart) {
  const rows = series
    .map((s, line) => ({ line, label: s.label, value: s.values[s.rounds.indexOf(round)] }))
    .filter((r) => r.value !== undefined && !chart.querySelector(`[data-line="${r.line}"]`)?.classList.contains("off"))
    .sort((a, b) => (percent ? b.value - a.value : a.value - b.value));
  tip.replaceChildren(element("b", `round ${round}`));
  for (const row of rows) {
    const line = element("div", "");
    line.className = `c${row.line % 7}`;
    line.append(element("i", ""), element("span", `${row.label}  ${percent ? (100 * row.value).toFixed(1) + " %" : row.value.toPrecision(3)}`));
    tip.append(line);
  }
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.max(8, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)) + "px";
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
