"use strict";
/* Makes the static figures interactive: hover, zoom, keyboard. Nothing is fetched, nothing is
   evaluated; all text goes through textContent. */
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const hover = document.getElementById("hover");

  // --- numbers and ticks: the same rules as report/scales.py ---------------------------------
  const raised = (n) => String(n).replace(/[-0-9]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  const general = (v, digits) => {
    let s = v.toPrecision(digits);
    if (s.includes("e")) return Math.round(v).toLocaleString("en-US");
    return s.includes(".") ? s.replace(/\.?0+$/, "") : s;
  };
  const number = (v, digits = 3) => {
    let s;
    if (v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6)) s = general(v, digits);
    else {
      const [mantissa, exponent] = v.toExponential(digits - 1).split("e");
      s = `${mantissa}×10${raised(Number(exponent))}`;
    }
    return s.replace(/-/g, "−");
  };
  const tickLabel = (v) => {
    if (v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5)) return String(Number(v.toPrecision(6))).replace("-", "−");
    const [mantissa, exponent] = Math.abs(v).toExponential(5).split("e");
    const factor = String(Number(mantissa)), power = `10${raised(Number(exponent))}`;
    return `${v < 0 ? "−" : ""}${factor === "1" ? power : `${factor}×${power}`}`;
  };
  const warp = (s, v) => s.kind === "log" ? Math.log10(Math.max(v, 1e-300))
    : s.kind === "symlog" ? Math.asinh(v / s.threshold) : v;
  const unwarp = (s, u) => s.kind === "log" ? 10 ** u
    : s.kind === "symlog" ? Math.sinh(u) * s.threshold : u;
  const roundNumbers = (low, high) => {
    const span = high - low;
    if (!(span > 0)) return [low];
    let step = 10 ** Math.floor(Math.log10(span / 4));
    for (const factor of [1, 2, 5, 10]) {
      if (span / (step * factor) <= 6) { step *= factor; break; }
    }
    const values = [];
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) {
      values.push(Number((i * step).toPrecision(12)));
    }
    return values;
  };
  const within = (s, factors) => {
    const reach = Math.max(Math.abs(s.low), Math.abs(s.high));
    const smallest = s.kind === "log" ? s.low : s.threshold;
    let powers = [];
    for (let e = Math.floor(Math.log10(smallest)); e <= Math.floor(Math.log10(reach)); e++) {
      for (const factor of factors) powers.push(Number(`${factor}e${e}`));
    }
    if (s.kind === "symlog") {
      powers = powers.filter((p) => p >= s.threshold);
      powers = [...powers.map((p) => -p).reverse(), 0, ...powers];
    }
    return powers.filter((p) => p >= s.low && p <= s.high);
  };
  const thinned = (values, most = 7) => {
    if (values.length <= most) return values;
    const every = Math.ceil(values.length / most), anchor = Math.max(values.indexOf(0), 0);
    return values.filter((_, i) => (i - anchor) % every === 0);
  };
  const ticks = (s) => {
    let values = s.kind === "linear" ? [] : within(s, [1]);
    if (values.length < 3 && s.kind !== "linear") values = within(s, [1, 2, 5]);
    if (values.length < 3) values = roundNumbers(s.low, s.high);
    return thinned(values);
  };

  // --- hover ---------------------------------------------------------------------------------
  const say = (text, x, y) => {
    hover.textContent = text;
    hover.hidden = false;
    const box = hover.getBoundingClientRect();
    hover.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    hover.style.top = `${y > box.height + 20 ? y - box.height - 12 : y + 18}px`;
  };
  const hush = () => { hover.hidden = true; };
  addEventListener("scroll", hush, { passive: true });

  // --- one figure ----------------------------------------------------------------------------
  const enhance = (figure) => {
    const plot = figure.querySelector(".plot");
    if (!plot) return;
    const marks = plot.querySelector(".marks"), clip = plot.querySelector(".clip");
    const width = Number(plot.dataset.width), height = Number(plot.dataset.height);
    const dots = [...plot.querySelectorAll(".dot")];
    const cells = plot.dataset.cells ? JSON.parse(document.getElementById(plot.dataset.cells).textContent) : null;
    const scale = (a) => plot.dataset[`${a}Kind`] && {
      kind: plot.dataset[`${a}Kind`], low: Number(plot.dataset[`${a}Low`]),
      high: Number(plot.dataset[`${a}High`]), threshold: Number(plot.dataset[`${a}Threshold`]),
    };
    const scales = { x: scale("x"), y: scale("y") };
    const whole = { x: 0, y: 0, w: width, h: height };
    let view = { ...whole }, current = -1, frame = null;

    const local = (event) => {
      const matrix = clip.getScreenCTM();
      return { x: (event.clientX - matrix.e) / matrix.a, y: (event.clientY - matrix.f) / matrix.d };
    };
    const toScreen = (x, y) => {
      const matrix = clip.getScreenCTM();
      const px = (x - view.x) * width / view.w, py = (y - view.y) * height / view.h;
      return { x: px * matrix.a + matrix.e, y: py * matrix.d + matrix.f, inside: px >= -1 && px <= width + 1 && py >= -1 && py <= height + 1 };
    };

    const drawAxis = (a) => {
      const axis = plot.querySelector(`.axis.${a}`), size = a === "x" ? width : height;
      const from = a === "x" ? view.x : view.y, span = a === "x" ? view.w : view.h;
      const put = (tick, at) => {
        const p = (at - from) * size / span;
        tick.setAttribute("transform", a === "x" ? `translate(${p},${height})` : `translate(0,${p})`);
        tick.style.display = p < -0.5 || p > size + 0.5 ? "none" : "";
      };
      const all = [...axis.querySelectorAll(".tick")];
      if (axis.dataset.kind === "names") { all.forEach((t) => put(t, Number(t.dataset.at))); return; }
      const s = scales[a], low = warp(s, s.low), high = warp(s, s.high);
      const share = (p) => a === "x" ? p / size : 1 - p / size;
      const ends = [from, from + span].map((p) => unwarp(s, low + share(p) * (high - low)));
      const shown = { ...s, low: Math.min(...ends), high: Math.max(...ends) };
      const pattern = all[0].cloneNode(true);
      all.forEach((t) => t.remove());
      for (const value of ticks(shown)) {
        const tick = pattern.cloneNode(true);
        const place = (warp(s, value) - low) / (high - low) * size;
        tick.querySelector("text").textContent = tickLabel(value);
        put(tick, a === "x" ? place : size - place);
        axis.append(tick);
      }
    };
    const show = (next) => {
      const w = Math.min(Math.max(next.w, width / 400), width), h = Math.min(Math.max(next.h, height / 400), height);
      view = { w, h, x: Math.min(Math.max(next.x, 0), width - w), y: Math.min(Math.max(next.y, 0), height - h) };
      marks.setAttribute("transform", `scale(${width / view.w},${height / view.h}) translate(${-view.x},${-view.y})`);
      drawAxis("x"); drawAxis("y");
      figure.classList.toggle("zoomed", view.w < width || view.h < height);
      hush();
    };
    const zoom = (factor, centre = { x: view.x + view.w / 2, y: view.y + view.h / 2 }) => show({
      x: centre.x - (centre.x - view.x) * factor, y: centre.y - (centre.y - view.y) * factor,
      w: view.w * factor, h: view.h * factor,
    });

    const cellText = (i, j) => {
      const value = cells.values[i][j], note = cells.notes && cells.notes[i][j];
      return `${cells.rows[i]} × ${cells.columns[j]}: ${value === null ? "not computed" : number(value)}${note ? ` ${note}` : ""}`;
    };
    const unmark = () => {
      dots.forEach((dot) => dot.classList.remove("current"));
      if (frame) { frame.remove(); frame = null; }
    };
    const point = (index) => {
      unmark();
      current = index;
      if (cells) {
        const rows = cells.rows.length, columns = cells.columns.length;
        const i = Math.floor(index / columns), j = index % columns;
        frame = document.createElementNS(SVG, "rect");
        const side = { x: width / columns, y: height / rows };
        for (const [k, v] of Object.entries({ x: j * side.x, y: i * side.y, width: side.x, height: side.y, class: "cell-frame" })) frame.setAttribute(k, v);
        marks.append(frame);
        const at = toScreen((j + 0.5) * side.x, (i + 0.5) * side.y);
        say(cellText(i, j), at.x, at.y);
      } else {
        const dot = dots[index];
        dot.classList.add("current");
        const at = toScreen(Number(dot.dataset.x), Number(dot.dataset.y));
        say(dot.querySelector("title").textContent, at.x, at.y);
      }
    };
    const nearest = (event) => {
      if (cells) {
        const p = local(event);
        const j = Math.floor((view.x + p.x * view.w / width) / width * cells.columns.length);
        const i = Math.floor((view.y + p.y * view.h / height) / height * cells.rows.length);
        return i >= 0 && i < cells.rows.length && j >= 0 && j < cells.columns.length ? i * cells.columns.length + j : -1;
      }
      let best = -1, distance = 40 ** 2;
      dots.forEach((dot, index) => {
        const at = toScreen(Number(dot.dataset.x), Number(dot.dataset.y));
        const d = (at.x - event.clientX) ** 2 + (at.y - event.clientY) ** 2;
        if (at.inside && d < distance) { distance = d; best = index; }
      });
      return best;
    };

    // pointer: hover, drag a rectangle to zoom, double click to see all
    let start = null, band = null;
    const area = plot.closest("svg");
    area.style.touchAction = "pan-x pan-y";
    area.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return;
      const p = local(event);
      if (p.x >= 0 && p.x <= width && p.y >= 0 && p.y <= height) {
        start = p;
        area.setPointerCapture(event.pointerId);
      }
    });
    area.addEventListener("pointermove", (event) => {
      if (start) {
        const p = local(event);
        const box = { x: Math.min(p.x, start.x), y: Math.min(p.y, start.y), w: Math.abs(p.x - start.x), h: Math.abs(p.y - start.y) };
        if (!band) { band = document.createElementNS(SVG, "rect"); band.setAttribute("class", "zooming"); clip.append(band); }
        for (const [k, v] of [["x", box.x], ["y", box.y], ["width", box.w], ["height", box.h]]) band.setAttribute(k, v);
        band.box = box;
        hush();
        return;
      }
      const index = nearest(event);
      if (index < 0) { unmark(); hush(); } else point(index);
    });
    const finish = () => {
      if (band) {
        const { x, y, w, h } = band.box;
        if (w > 6 && h > 6) show({ x: view.x + x * view.w / width, y: view.y + y * view.h / height, w: w * view.w / width, h: h * view.h / height });
        band.remove();
      }
      start = band = null;
    };
    area.addEventListener("pointerup", finish);
    area.addEventListener("pointercancel", finish);
    area.addEventListener("pointerleave", () => { if (!start) { unmark(); hush(); } });
    area.addEventListener("dblclick", () => show({ ...whole }));
    area.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // plain wheel scrolls the page
      event.preventDefault();
      const p = local(event);
      zoom(event.deltaY > 0 ? 1.25 : 0.8, { x: view.x + p.x * view.w / width, y: view.y + p.y * view.h / height });
    }, { passive: false });

    // keyboard: arrows walk through the points or cells, + − 0 zoom
    const count = cells ? cells.rows.length * cells.columns.length : dots.length;
    figure.addEventListener("keydown", (event) => {
      if (event.target !== figure || event.altKey || event.ctrlKey || event.metaKey) return;
      const row = cells ? cells.columns.length : 1;
      const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row };
      if (event.key in moves && count) point(((current + moves[event.key]) % count + count) % count);
      else if (event.key === "+" || event.key === "=") zoom(0.7);
      else if (event.key === "-") zoom(1 / 0.7);
      else if (event.key === "0" || event.key === "Escape") { show({ ...whole }); unmark(); }
      else return;
      event.preventDefault();
    });
    figure.addEventListener("blur", () => { unmark(); hush(); current = -1; });

    const tools = document.createElement("div");
    tools.className = "tools";
    for (const [label, name, action] of [["+", "Zoom in", () => zoom(0.7)], ["−", "Zoom out", () => zoom(1 / 0.7)], ["⟲", "Show all", () => show({ ...whole })]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      button.setAttribute("aria-label", name);
      button.addEventListener("click", action);
      tools.append(button);
    }
    figure.append(tools);
    figure.dataset.ready = "true";
  };

  // --- tables: a click on a heading sorts, a button saves them as CSV ------------------------
  const numeric = (text) => {
    const plain = text.replace(/−/g, "-").replace(/(\d),(?=\d{3})/g, "$1")
      .replace(/×\s*10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)/, (_, raisedDigits) =>
        `e${[...raisedDigits].map((c) => "-0123456789"["⁻⁰¹²³⁴⁵⁶⁷⁸⁹".indexOf(c)]).join("")}`);
    const match = plain.match(/^[^\d-]{0,3}(-?\d+(?:\.\d*)?(?:e-?\d+)?)/);
    return match ? Number(match[1]) : null;
  };
  const sortBy = (table, column, header) => {
    const body = table.tBodies[0], rows = [...body.rows];
    const direction = header.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    const keys = new Map(rows.map((row) => {
      const text = row.cells[column].textContent.trim();
      return [row, { text, value: numeric(text) }];
    }));
    const byNumber = rows.filter((row) => keys.get(row).value !== null).length > rows.length / 2;
    const sign = direction === "ascending" ? 1 : -1;
    rows.sort((one, two) => {
      const a = keys.get(one), b = keys.get(two);
      if (!byNumber) return sign * a.text.localeCompare(b.text);
      if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
      return sign * (a.value - b.value);
    });
    rows.forEach((row) => body.append(row));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
  };
  const csvOf = (table) => [...table.rows].map((row) => [...row.cells]
    .map((cell) => `"${cell.textContent.trim().replace(/"/g, '""')}"`).join(",")).join("\r\n");
  document.querySelectorAll("main .table").forEach((holder) => {
    const table = holder.querySelector("table");
    if (table.tBodies[0].rows.length > 1) {
      [...table.tHead.rows[0].cells].forEach((header, column) => {
        if (!header.textContent.trim()) return;
        header.classList.add("sortable");
        header.tabIndex = 0;
        header.title = "Sort by this column";
        header.addEventListener("click", () => sortBy(table, column, header));
        header.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sortBy(table, column, header); }
        });
      });
    }
    const save = document.createElement("button");
    save.type = "button";
    save.className = "csv";
    save.textContent = "CSV";
    const named = table.caption ? table.caption.textContent : holder.closest("section").id;
    save.setAttribute("aria-label", `Save the table as CSV: ${named}`);
    save.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob(["\ufeff" + csvOf(table)], { type: "text/csv" }));
      link.download = `${named.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60)}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
    holder.append(save);
  });

  document.querySelectorAll("figure.chart").forEach(enhance);
  // a film shows the frame of its slider; without JavaScript all frames stand below each other
  document.querySelectorAll(".film").forEach((film) => {
    const slider = film.querySelector("input"), frames = [...film.querySelectorAll(".frame")];
    const small = [...film.querySelectorAll(".thumbnail")];
    const turn = (to) => {
      slider.value = String(to);
      frames.forEach((frame, i) => { frame.hidden = i !== to; });
      small.forEach((figure, i) => figure.classList.toggle("current", i === to));
    };
    slider.addEventListener("input", () => turn(Number(slider.value)));
    small.forEach((figure, i) => figure.addEventListener("click", () => turn(i)));
    turn(0);
  });
  // paper shows what a reader would have to open
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.dataset.was = d.open; d.open = true; }));
  addEventListener("afterprint", () => document.querySelectorAll("details").forEach((d) => { d.open = d.dataset.was === "true"; }));
})();
