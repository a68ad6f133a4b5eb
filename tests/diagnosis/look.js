// What a reader would find wrong with a page, as sentences; a good page gives none.
(() => {
  const wrong = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) wrong.push("the page scrolls sideways");

  // Contrast of text, by WCAG 2.
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map((n) => ((n /= 255) <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/^rgba\(.*, 0\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = "h1, h2, h3, h4, td, th, small, p, dt, dd, a, summary, button, .badge, .keys li, .keys b, .plot text";
  for (const node of document.querySelectorAll(texts)) {
    if (!node.textContent.trim() || !node.checkVisibility()) continue;
    const drawn = node.tagName === "text";
    const under = node.closest("g")?.querySelector("rect.role");
    const one = light(getComputedStyle(node)[drawn ? "fill" : "color"]);
    const two = light(under ? getComputedStyle(under).fill : ground(node));
    const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(1)} of ${node.tagName} ${node.textContent.slice(0, 30)}`);
  }

  for (const node of document.querySelectorAll("figure, svg.plot, .panels img, .panels .none, table, .bar")) {
    if (node.closest("details:not([open]), dialog")) continue;
    const name = `${node.tagName} ${node.getAttribute("aria-label") ?? node.className}`;
    const box = node.getBoundingClientRect();
    const least = node.matches(".bar") ? 4 : 8;
    if (!node.checkVisibility() || box.width < 8 || box.height < least) wrong.push(`${name} is not visible`);
    if (box.left < -1) wrong.push(`${name} begins left of the window`);
    if (box.right > width + 1 && !node.parentElement.closest(".scroll")) wrong.push(`${name} leaves the window`);
    if (node.complete === false || node.naturalWidth === 0) wrong.push(`${name} is no picture`);
  }
  for (const plot of document.querySelectorAll("svg.plot")) {
    const marks = [...plot.querySelectorAll("rect, path, circle, text")].map((mark) => mark.cloneNode().outerHTML);
    if (/NaN|Infinity|[" ]-?inf|[" ]nan/.test(marks.join())) wrong.push(`${plot.getAttribute("aria-label")} has no place`);
  }
  return wrong;
})();
