// Numbers of the mark under the pointer, or chosen with the arrow keys, below its picture; and pictures enlarged.
for (const plot of document.querySelectorAll("svg.plot")) {
  const marks = [...plot.querySelectorAll("rect, circle, path")].filter((mark) => mark.querySelector("title"));
  const readout = plot.closest("figure").querySelector(".readout");
  let at = -1;
  const choose = (index) => {
    if (at >= 0) marks[at].classList.remove("on");
    at = index;
    if (at >= 0) marks[at].classList.add("on");
    readout.textContent = at >= 0 ? marks[at].querySelector("title").textContent : "";
  };
  plot.addEventListener("pointerover", (event) => choose(marks.indexOf(event.target)));
  plot.addEventListener("pointerleave", () => choose(-1));
  plot.addEventListener("blur", () => choose(-1));
  plot.addEventListener("keydown", (event) => {
    const row = Number(plot.dataset.columns) || 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
    if (!step || !marks.length) return;
    event.preventDefault();
    choose(at < 0 ? 0 : Math.min(marks.length - 1, Math.max(0, at + step)));
  });
}
const large = document.querySelector("dialog.large");
for (const button of document.querySelectorAll(".panels button")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img");
    if (!image) return;
    large.querySelector("h3").textContent = button.title;
    large.querySelector("img").src = image.src;
    large.querySelector("img").alt = button.title;
    large.showModal();
  });
}
large.addEventListener("click", (event) => event.target === large && large.close());
