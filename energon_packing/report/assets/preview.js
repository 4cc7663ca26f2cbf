"use strict";
(async () => {
  const main = document.getElementById("packs");
  if (!("DecompressionStream" in window)) {
    main.textContent = "This browser cannot unpack the page. Open it in one of 2023 or later, or use --json.";
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (char) => char.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { facts, packs, pictures } = await new Response(unpacked).json();
  const KINDS = ["text", "trained", "image", "video"];
  const SVG = "http://www.w3.org/2000/svg";
  const number = new Intl.NumberFormat("en");
  const plural = (count, word) => `${number.format(count)} ${word}${count === 1 ? "" : "s"}`;

  // Everything that comes from data becomes text or an attribute here, never markup.
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const shape = (name, attributes) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const canvas = (kind, height) =>
    shape("svg", { class: kind, viewBox: `0 0 ${facts.seq_length} ${height}`, preserveAspectRatio: "none",
      "aria-hidden": "true" });

  const label = (segment) => {
    const parts = [segment.name, plural(segment.tokens, "token")];
    if (segment.kind === "sample") parts.push(`${number.format(segment.trained)} trained`);
    if (segment.media.length) parts.push(`${number.format(segment.media.length)} images or videos`);
    if (segment.padding) parts.push(`${number.format(segment.padding)} padding`);
    return parts.join(", ");
  };

  const drawnRow = (pack) => {
    const svg = canvas("picture", 10);
    for (const segment of pack.segments) {
      let at = segment.start;
      for (const [kind, width] of segment.runs) {
        const name = segment.kind === "dummy" ? "dummy" : KINDS[kind];
        svg.append(shape("rect", { class: name, x: at, y: 0, width, height: 10 }));
        at += width;
      }
      if (segment.padding) {
        const name = segment.kind === "tail" ? "tail" : "align";
        svg.append(shape("rect", { class: name, x: at, y: 0, width: segment.padding, height: 10 }));
        at += segment.padding;
      }
      svg.append(shape("path", { class: "edge", d: `M${at} 0V10` }));
    }
    return svg;
  };

  const colour = (rank) => `hsl(${Math.round(190 + (360 * rank) / facts.context_parallel) % 360} 45% 55%)`;
  const rankLegend = () => {
    const list = element("ul", { class: "legend", "aria-label": "Context-parallel ranks" });
    for (let rank = 0; rank < facts.context_parallel; rank += 1) {
      const key = element("i", { class: "key" });
      key.style.background = colour(rank);
      list.append(element("li", {}, key, `CP rank ${rank}`));
    }
    return list;
  };
  const drawnRanks = (pack) => {
    const svg = canvas("ranks", 1);
    for (const segment of pack.segments)
      for (const [rank, start, stop] of segment.slices)
        svg.append(shape("rect", { x: start, y: 0, width: stop - start, height: 1,
          fill: colour(rank) }));
    return svg;
  };

  const figure = (media) => {
    const made = element("figure");
    media.pictures.map((place) => pictures[place]).forEach((source, at) => {
      if (!source.startsWith("data:image/jpeg;base64,")) return;
      const of = media.pictures.length > 1 ? `, frame ${at + 1} of ${media.pictures.length} shown` : "";
      made.append(element("img", { src: source, alt: `${media.label}${of}`, loading: "lazy" }));
    });
    made.append(element("figcaption", {}, media.name ? `${media.label} (${media.name})` : media.label));
    return made;
  };

  const turns = (segment) => {
    const made = element("div", { class: "turns code", dir: "auto", tabindex: "0", role: "region",
      "aria-label": `Text of ${segment.name}` });
    for (const piece of segment.pieces) {
      if (piece.length === 1) made.append(figure(segment.media[piece[0]]));
      else if (piece[1]) made.append(element("mark", { title: "trained" }, piece[0]));
      else made.append(piece[0]);
    }
    return made;
  };

  const facts_of = (segment, pack) => {
    const list = element("dl");
    const add = (name, value) => list.append(element("dt", {}, name), element("dd", {}, value));
    const end = segment.start + segment.tokens;
    add("tokens", `${number.format(segment.tokens)}, from ${number.format(segment.start)} to ${number.format(end)}`);
    if (segment.padding)
      add("padding", `${number.format(segment.padding)}, ${segment.kind === "tail" ? "masked tail of the row"
        : segment.kind === "dummy" ? "around the dummy image" : `alignment to a multiple of ${facts.multiple}`}`);
    if (segment.kind === "sample")
      add("trained", `${number.format(segment.trained)} targets, weight ${number.format(segment.weight)}`);
    add("positions", segment.positions.map(([low, high]) => `${low} to ${high}`).join("; "));
    if (segment.slices.length)
      for (let rank = 0; rank < facts.context_parallel; rank += 1)
        add(`CP rank ${rank}`, segment.slices.filter((slice) => slice[0] === rank)
          .map(([, start, stop]) => `${start} to ${stop}`).join("; "));
    if (segment.source) add("source", segment.source);
    for (const change of pack.changed.filter((each) => each.key === segment.key))
      add(change.how, change.detail);
    return list;
  };

  const boundaries = (pack) => {
    const list = element("dl");
    list.append(element("dt", {}, "cu_seqlens"), element("dd", { class: "code" }, pack.boundaries.join(", ")),
      element("dt", {}, "cu_seqlens_padded"),
      element("dd", { class: "code" }, pack.padded ? pack.padded.join(", ") : "none"),
      element("dt", {}, "max_seqlen"), element("dd", { class: "code" }, String(pack.max_seqlen)),
      element("dt", {}, "position_ids"), element("dd", { class: "code" }, `[${pack.shape.join(", ")}]`));
    return list;
  };

  let count = 0;
  const close = (section) => {
    const open = section.querySelector("[aria-expanded=true]");
    if (open) {
      open.setAttribute("aria-expanded", "false");
      section.querySelector(".detail")?.remove();
    }
    return open;
  };
  const toggle = (section, button, pack, segment) => {
    if (close(section) === button) return;
    const heading = element("h3", {}, segment.name);
    const shut = element("button", { class: "button", type: "button" }, "Close");
    shut.addEventListener("click", () => { close(section); button.focus(); });
    const detail = element("div", { class: "detail", id: `detail-${count += 1}`, role: "region",
      "aria-label": segment.name }, heading, facts_of(segment, pack));
    if (segment.pieces.length) detail.append(turns(segment));
    const placed = new Set(segment.pieces.filter((piece) => piece.length === 1).map((piece) => piece[0]));
    segment.media.forEach((media, at) => { if (!placed.has(at)) detail.append(figure(media)); });
    detail.append(element("h3", {}, "Boundaries of the pack"), boundaries(pack), shut);
    button.setAttribute("aria-expanded", "true");
    button.setAttribute("aria-controls", detail.id);
    section.insertBefore(detail, section.querySelector(".dropped"));
  };

  const build = (section) => {
    const pack = packs[Number(section.dataset.pack)];
    const row = element("div", { class: "row", role: "group", "aria-label": `Samples of pack ${pack.index}` });
    row.append(drawnRow(pack));
    for (const segment of pack.segments) {
      const button = element("button", { type: "button", "aria-expanded": "false", "aria-label": label(segment),
        title: label(segment) });
      button.style.left = `${(100 * segment.start) / facts.seq_length}%`;
      button.style.width = `${(100 * (segment.tokens + segment.padding)) / facts.seq_length}%`;
      button.addEventListener("click", () => toggle(section, button, pack, segment));
      row.append(button);
    }
    section.append(row);
    if (facts.context_parallel > 1) section.append(drawnRanks(pack));
    if (pack.dropped.length) {
      const list = element("ul");
      for (const entry of pack.dropped)
        list.append(element("li", {}, `${entry.key} (${entry.reason}: ${entry.detail})`));
      section.append(element("details", { class: "dropped" },
        element("summary", {}, `${plural(pack.dropped.length, "sample")} dropped before this pack`), list));
    }
  };

  // Only packs near the screen are built, so that a thousand of them open at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      build(entry.target);
    }
  }, { rootMargin: "1200px" });
  if (facts.context_parallel > 1) main.before(rankLegend());
  packs.forEach((pack, at) => {
    const title = element("h2", {}, `Pack ${pack.index} `, element("span", {},
      `${number.format(pack.real)} of ${number.format(pack.tokens)} tokens, fill ${(100 * pack.fill).toFixed(2)} %, ` +
      plural(pack.segments.filter((segment) => segment.kind === "sample").length, "sample")));
    const section = element("section", { class: "pack", "data-pack": String(at) }, title);
    main.append(section);
    watcher.observe(section);
  });

  const step = (from, by) => {
    const buttons = [...from.parentElement.querySelectorAll("button")];
    return buttons[buttons.indexOf(from) + by];
  };
  const neighbour = (section, by) => {
    const next = by > 0 ? section.nextElementSibling : section.previousElementSibling;
    if (!next) return null;
    if (!next.querySelector(".row")) { watcher.unobserve(next); build(next); }
    return next.querySelector(".row button");
  };
  main.addEventListener("keydown", (event) => {
    const section = event.target.closest(".pack");
    if (event.key === "Escape" && section) { close(section)?.focus(); return; }
    if (!event.target.matches(".row button")) return;
    const next = { ArrowRight: () => step(event.target, 1), ArrowLeft: () => step(event.target, -1),
      ArrowDown: () => neighbour(section, 1), ArrowUp: () => neighbour(section, -1) }[event.key]?.();
    if (next) { event.preventDefault(); next.focus(); }
  });
})();
