"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraw();
  });

  // A chart names its colours as the style sheet does; it is drawn when it is about to be seen.
  const plots = document.querySelectorAll(".plot"), drawn = new Set(), spoken = document.getElementById("spoken");
  const draw = (place) => {
    const style = getComputedStyle(root);
    const { data, layout } = JSON.parse(place.dataset.plot, (key, value) =>
      key.endsWith("color") ? style.getPropertyValue(`--${value}`).trim() : value);
    layout.font.family = getComputedStyle(document.body).fontFamily;
    layout.width = place.clientWidth || undefined;
    drawn.add(place);
    return Plotly.react(place, data, layout, { displayModeBar: false, typesetMath: false });
  };
  const redraw = () => drawn.forEach(draw);
  addEventListener("resize", () => drawn.forEach((place) => { if (place.clientWidth !== place.layout.width) draw(place); }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watch.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "400px" });
  for (const place of plots) {
    watch.observe(place);
    // The arrow keys go from value to value, as the pointer does.
    let at = -1;
    place.tabIndex = 0;
    place.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !drawn.has(place)) return;
      const points = place.data.flatMap((trace, curveNumber) => trace.x.map((_, pointNumber) => ({ curveNumber, pointNumber })));
      at = Math.min(Math.max(at + step, 0), points.length - 1);
      Plotly.Fx.hover(place, [points[at]]);
      // A chart is an image to a screen reader, which reads this instead. Tips have entities in place of markup.
      const tip = place.data[points[at].curveNumber].hovertext[points[at].pointNumber];
      spoken.textContent = new DOMParser().parseFromString(tip, "text/html").body.textContent;
      event.preventDefault();
    });
    place.addEventListener("blur", () => { if (drawn.has(place)) Plotly.Fx.unhover(place); });
  }
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    plots.forEach((place) => { if (place.offsetParent) draw(place); });
  });
  addEventListener("afterprint", () => { root.classList.remove("printing"); redraw(); });

  let current = null;
  const stop = () => { if (current) current.pause(); };
  for (const clip of document.querySelectorAll(".clip")) {
    const audio = clip.querySelector("audio"), button = clip.querySelector(".play");
    const picture = clip.querySelector(".picture"), cursor = clip.querySelector(".cursor");
    const show = () => {
      cursor.style.display = audio.currentTime > 0 ? "block" : "none";
      cursor.style.left = `${(100 * audio.currentTime) / (audio.duration || 1)}%`;
      if (!audio.paused) requestAnimationFrame(show);
    };
    const play = () => { if (current !== audio) stop(); current = audio; return audio.play(); };
    button.addEventListener("click", () => (audio.paused ? play() : audio.pause()));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step && audio.duration) { audio.currentTime = Math.min(Math.max(audio.currentTime + step, 0), audio.duration); show(); event.preventDefault(); }
    });
    picture.addEventListener("click", async (event) => {
      const box = picture.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
      await play();
      audio.currentTime = share * audio.duration;
    });
    audio.addEventListener("play", () => { clip.classList.add("playing"); button.setAttribute("aria-pressed", "true"); show(); });
    audio.addEventListener("pause", () => { clip.classList.remove("playing"); button.setAttribute("aria-pressed", "false"); });
  }

  const table = document.querySelector(".pairs");
  if (!table) return;
  const body = table.tBodies[0], rows = [...body.rows];
  for (const button of table.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), name = button.dataset.name;
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => { const cell = row.querySelector(`[data-name="${name}"]`); return cell && cell.dataset.value !== "" ? Number(cell.dataset.value) : NaN; };
      const key = new Map(rows.map((row) => [row, value(row)]));
      rows.sort((a, b) => (isNaN(key.get(a)) - isNaN(key.get(b))) || (up ? 1 : -1) * (key.get(a) - key.get(b)) || 0);
      body.append(...rows);
    });
  }
  const words = document.getElementById("filter-text"), reason = document.getElementById("filter-reason");
  const count = document.getElementById("filter-count");
  const filter = () => {
    let shown = 0;
    for (const row of rows) {
      const fits = row.textContent.toLowerCase().includes(words.value.toLowerCase())
        && (!reason.value || row.dataset.reasons.split("|").includes(reason.value));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length} pairs`;
  };
  words.addEventListener("input", filter);
  reason.addEventListener("change", filter);
  filter();
})();
