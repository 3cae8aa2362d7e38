// What scrolls sideways must be reachable without a mouse, and its edge shows that there is more.
for (const box of document.querySelectorAll(".scroll, pre")) {
  const look = () => {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
  };
  box.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(box);
}
