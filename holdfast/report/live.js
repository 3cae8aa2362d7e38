"use strict";
// Asks this page's own server whether more rounds are committed, and shows them. What was open and where one was stays so.
(() => {
  const shown = JSON.parse(document.getElementById("live-state").textContent);
  const bar = document.createElement("div");
  bar.setAttribute("role", "status");
  bar.className = "keys"; // not on paper
  bar.style.cssText = "position:sticky;bottom:0;gap:14px;align-items:center;justify-content:center;padding:9px 14px;margin:0;"
    + "background:var(--card);border-top:1px solid var(--rule);font-size:14px;z-index:3";
  const words = document.createElement("span");
  const hold = document.createElement("button");
  hold.type = "button";
  hold.className = "key";
  bar.append(words, hold);
  document.body.append(bar);

  const HERE = location.pathname === "/" ? "" : location.pathname; // of one run among many
  const KEY = "holdfast-live" + HERE;
  const kept = JSON.parse(sessionStorage.getItem(KEY) || "{}");
  const folds = () => [...document.querySelectorAll("details")];
  let held = Boolean(kept.held), silent = 0;
  folds().forEach((fold, place) => { if ((kept.open || []).includes(place)) fold.open = true; });
  if (kept.y) window.scrollTo(0, kept.y);

  const keep = () => sessionStorage.setItem(KEY, JSON.stringify({
    held, y: window.scrollY, open: folds().map((fold, place) => fold.open ? place : -1).filter((place) => place >= 0),
  }));
  const label = () => { hold.textContent = held ? "Resume" : "Pause"; hold.setAttribute("aria-pressed", String(!held)); };
  const say = (state, note) => {
    const ago = state.age === null ? "" : `, last commit ${state.age < 120 ? state.age + " s" : Math.round(state.age / 60) + " min"} ago`;
    words.textContent = state.words.charAt(0).toUpperCase() + state.words.slice(1) + ago + (note ? ` (${note})` : "");
  };
  hold.addEventListener("click", () => { held = !held; label(); keep(); });
  window.addEventListener("pagehide", keep);
  label();
  say(shown);

  const ask = async () => {
    try {
      const answer = await fetch("/state" + HERE, { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      const state = await answer.json();
      silent = 0;
      const more = state.version !== shown.version;
      say(state, more && held ? "more is committed; held still" : "");
      if (more && !held && !document.hidden) { keep(); location.reload(); return; }
    } catch (error) {
      silent += 1;
      if (silent > 1) say(shown, "no answer: the server has been stopped");
    }
    setTimeout(ask, silent > 5 ? 10000 : 2000);
  };
  setTimeout(ask, 2000);
})();
