// The page is XML too, so this text has none of its special characters.
const replies = Array.from(document.querySelectorAll(".reply")).map((reply) => {
  const why = reply.querySelector(".why");
  const timeline = reply.querySelector(".timeline");
  const tokens = reply.querySelector(".tokens");
  const bars = Array.from(reply.querySelectorAll(".bar"));
  const last = bars.length - 1;
  let selected = 0;

  const explain = (cycle) => {
    const text = document.getElementById(`${reply.id}-w${cycle}`);
    why.replaceChildren(text.content.cloneNode(true));
  };
  const mark = (cycle, isSelected) => {
    bars[cycle].setAttribute("aria-selected", isSelected);
    for (const piece of tokens.querySelectorAll(`[data-cycle="${cycle}"]`)) {
      piece.classList.toggle("selected", isSelected);
    }
  };
  const select = (cycle) => {
    mark(selected, false);
    selected = Math.max(0, Math.min(cycle, last));
    mark(selected, true);
    explain(selected);
    timeline.setAttribute("aria-activedescendant", bars[selected].id);
    const bar = bars[selected];
    timeline.scrollLeft = bar.offsetLeft - timeline.offsetLeft - timeline.clientWidth / 2;
  };
  const step = (key) => {
    const places = { ArrowLeft: selected - 1, ArrowRight: selected + 1, Home: 0, End: last };
    if (!(key in places)) return false;
    select(places[key]);
    return true;
  };

  if (last >= 0) {
    for (const part of [timeline, tokens]) {
      part.addEventListener("pointerover", (event) => {
        const piece = event.target.closest("[data-cycle]");
        if (piece) explain(Number(piece.dataset.cycle));
      });
      part.addEventListener("pointerleave", () => explain(selected));
      part.addEventListener("click", (event) => {
        const piece = event.target.closest("[data-cycle]");
        if (piece) select(Number(piece.dataset.cycle));
      });
      part.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.altKey || event.metaKey) return;
        if (step(event.key)) {
          event.preventDefault();
          const piece = tokens.querySelector(".selected");
          if (piece) if (part === tokens) piece.scrollIntoView({ block: "nearest" });
        }
      });
    }
    select(0);
  }
  return { element: reply, step: last >= 0 ? step : () => false };
});

// Without a focus, the arrow keys step through the first reply that is in view.
document.addEventListener("keydown", (event) => {
  if (event.target !== document.body) return;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (!event.key.startsWith("Arrow")) return;
  const seen = replies.find((reply) => reply.element.getBoundingClientRect().bottom > 0);
  if (seen) if (seen.step(event.key)) event.preventDefault();
});
