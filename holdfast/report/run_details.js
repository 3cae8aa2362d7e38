// Fields of cells: a pointer or the arrow keys read a value, a slider draws another round. Values come packed, two letters each.
(() => {
  "use strict";
  const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", STEPS = 4094, LEVELS = 12, BRIGHT = 7;
  const code = new Map([...LETTERS].map((letter, place) => [letter, place]));
  const hint = document.getElementById("tip") ?? document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip", hidden: true }));

  for (const field of document.querySelectorAll(".cells")) {
    let told = null; // unpacked when it is first needed: most fields of a page are never looked at
    const grid = () => (told ??= JSON.parse(field.dataset.grid));
    const svg = field.querySelector("svg.chart"), here = field.querySelector(".here"), slider = field.querySelector("input");
    let at = [0, 0];
    const frame = () => (slider ? Number(slider.value) : 0);
    const share = (row, column) => {
      const g = grid(), text = g.frames[frame()], i = 2 * (row * g.columns.length + column);
      const steps = 64 * code.get(text[i]) + code.get(text[i + 1]);
      return steps > STEPS ? null : steps / STEPS;
    };
    const value = (row, column) => {
      const g = grid(), s = share(row, column);
      return s === null ? null : g.log ? g.low * (g.high / g.low) ** s : g.low + s * (g.high - g.low);
    };
    const words = (row, column) => {
      const g = grid(), names = g.names ? g.names[frame()] : g.rows, v = value(row, column), more = g.says?.[`${row},${column}`];
      const said = g.texts?.[row * g.columns.length + column] || (v === null ? "" : row >= g.flags ? (v ? "yes" : "no") : g.share ? (100 * v).toFixed(1) + " %" : String(Number(v.toPrecision(3))));
      return [`${g.words[0]} ${names[row]}, ${g.words[1]} ${g.columns[column]}`, [said, more].filter(Boolean).join(", ") || "nothing recorded"];
    };
    const show = (row, column, x, y) => {
      at = [row, column];
      here.setAttribute("x", column);
      here.setAttribute("y", row);
      here.setAttribute("visibility", "visible");
      const [where, said] = words(row, column), head = document.createElement("b"), rest = document.createElement("span");
      head.textContent = where;
      rest.textContent = said;
      hint.replaceChildren(head, rest);
      hint.hidden = false;
      hint.style.left = Math.max(8, Math.min(x + 14, innerWidth - hint.offsetWidth - 8)) + "px";
      hint.style.top = Math.max(8, Math.min(y + 16, innerHeight - hint.offsetHeight - 8)) + "px";
    };
    const hide = () => { hint.hidden = true; here.setAttribute("visibility", "hidden"); };
    const focus = () => {
      const g = grid(), [left, top, wide, tall] = g.box;
      const spot = new DOMPoint(left + wide * (at[1] + 1), top + tall * (at[0] + 1)).matrixTransform(svg.getScreenCTM());
      show(at[0], at[1], spot.x, spot.y);
    };
    svg.addEventListener("pointermove", (event) => {
      const g = grid(), [left, top, wide, tall] = g.box;
      const spot = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const row = Math.floor((spot.y - top) / tall), column = Math.floor((spot.x - left) / wide);
      if (row < 0 || column < 0 || row >= g.rows.length || column >= g.columns.length) return hide();
      show(row, column, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    field.addEventListener("focus", () => { if (field.matches(":focus-visible")) focus(); });
    field.addEventListener("blur", hide);
    field.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.target !== field || (!step && event.key !== "Escape")) return;
      event.preventDefault();
      if (!step) return hide();
      const g = grid(), bound = (v, n) => Math.max(0, Math.min(n - 1, v));
      at = [bound(at[0] + step[0], g.rows.length), bound(at[1] + step[1], g.columns.length)];
      focus();
    });
    slider?.addEventListener("input", () => {
      hide();
      const g = grid(), paths = new Array(LEVELS + 1).fill(""), texts = field.querySelectorAll(".counts text");
      for (let row = 0; row < g.rows.length; row++) {
        for (let column = 0; column < g.columns.length; column++) {
          const s = share(row, column), v = value(row, column);
          const level = s === null ? -1 : s === 0 && g.low === 0 ? 0 : 1 + Math.min(Math.floor(s * LEVELS), LEVELS - 1);
          if (level >= 0) paths[level] += `M${column} ${row}.5h.94`;
          const text = texts[row * g.columns.length + column];
          if (!text) continue;
          text.textContent = v !== null && row >= g.flags ? (v ? "✓" : "✗") : v === null || (g.share && v < 0.005) ? "" : g.share ? (100 * v).toFixed(0) : String(Number(v.toPrecision(2)));
          text.classList.toggle("bright", level > BRIGHT);
        }
      }
      field.querySelectorAll(".shade").forEach((path) => { if (path.closest(".shades") === null) path.setAttribute("d", paths[Number(path.classList[1].slice(1))]); });
      const names = g.names?.[frame()];
      if (names) field.querySelectorAll("text.whose").forEach((label, row) => { label.textContent = names[row]; label.classList.toggle("bad", names[row].startsWith("▲")); });
      field.querySelector("output").textContent = g.rounds[frame()];
      slider.setAttribute("aria-valuetext", `round ${g.rounds[frame()]}`);
    });
  }
})();
