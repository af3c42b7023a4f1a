// The memory plan: steps to the right, offsets upwards, one rectangle per tensor.

(() => {
  if (!data.memory.length) { refresh(); followHash(); return; }

  const canvas = byId("timeline"), note = byId("memory-at"), chooser = byId("plan");
  const LEFT = 70, RIGHT = 12, TOP = 14, BOTTOM = 26;
  const hue = k => `hsl(${k * 137.508 % 360} 60% 55%)`;
  let plan = data.memory[0], from = 0, to = plan.steps.length; // the steps that are shown

  // Bytes alive in each step; tensors inside others count with them. The same as MemoryPlan.live_bytes.
  function liveBytes(plan) {
    const changes = new Array(plan.steps.length + 1).fill(0);
    for (const tensor of plan.tensors) {
      if (tensor.inside !== null) continue;
      const bytes = figure(tensor.bytes);
      changes[tensor.first] += bytes;
      changes[tensor.last + 1] -= bytes;
      for (const [first, last] of tensor.pauses) { changes[first] -= bytes; changes[last + 1] += bytes; }
    }
    let total = 0;
    return changes.slice(0, -1).map(change => total += change);
  }

  function numbers() {
    for (const plan of data.memory) {
      const lower = Math.max(0, ...liveBytes(plan)), arena = figure(plan.arena);
      const own = name => all(`[data-${name}]`).filter(item => item.dataset[name] === plan.function);
      for (const item of own("lower")) { item.textContent = bytesText(lower); item.dataset.bytes = lower; }
      for (const item of own("share")) item.textContent = (arena / Math.max(lower, 1)).toFixed(2);
    }
  }

  function draw() {
    numbers();
    const live = liveBytes(plan), arena = figure(plan.arena), lower = Math.max(0, ...live), steps = plan.steps.length;
    const WIDE = canvas.clientWidth || 1200, HIGH = canvas.clientHeight || 380, ticks = WIDE < 600 ? 2 : 4;
    const top = Math.max(arena, lower, 1) * 1.04;
    const x = step => LEFT + (step - from) / Math.max(to - from, 1) * (WIDE - LEFT - RIGHT);
    const within = place => Math.min(Math.max(place, LEFT), WIDE - RIGHT);
    const y = bytes => HIGH - BOTTOM - bytes / top * (HIGH - TOP - BOTTOM);
    const parts = [];
    for (let k = 0; k <= ticks; k++) {
      const bytes = top / 1.04 * k / ticks;
      parts.push(shape("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: y(bytes), y2: y(bytes) }));
      parts.push(shape("text", { class: "sub", x: LEFT - 6, y: y(bytes) + 4, "text-anchor": "end" }, bytesText(bytes)));
      const step = Math.round(from + (to - from) * k / ticks);
      parts.push(shape("text", { class: "sub", x: x(step), y: HIGH - 8, "text-anchor": k ? "end" : "start" }, `step ${step}`));
    }
    plan.tensors.forEach((tensor, k) => {
      if (tensor.last + 1 < from || tensor.first > to) return;
      const bytes = figure(tensor.bytes), offset = figure(tensor.offset);
      const title = `${tensor.name}: ${bytesText(bytes)} at ${bytesText(offset)}, steps ${tensor.first} to ${tensor.last}`
        + (tensor.inside ? `, inside ${tensor.inside}` : "") + `\n${plan.steps[tensor.first] ?? ""}\n${data.figures[tensor.bytes].text} bytes`;
      const box = shape("rect", {
        x: within(x(tensor.first)), width: Math.max(within(x(tensor.last + 1)) - within(x(tensor.first)), 1), y: y(offset + bytes),
        height: Math.max(y(offset) - y(offset + bytes), 0), fill: hue(k), "data-tensor": k,
        "data-bytes": bytes, "data-offset": offset,
      }, shape("title", {}, title));
      if (tensor.inside !== null) box.setAttribute("fill-opacity", .35);
      box.addEventListener("pointerenter", () => note.textContent = title.split("\n")[0]);
      if (tensor.kernel !== null) box.addEventListener("click", () => { location.hash = `kernel-${tensor.kernel}`; followHash(); });
      parts.push(box);
    });
    const line = live.map((bytes, step) => step + 1 < from || step > to ? ""
      : `${within(x(step))},${y(bytes)} ${within(x(step + 1))},${y(bytes)}`).join(" ");
    parts.push(shape("polyline", { class: "live", points: line }));
    const across = (bytes, kind) => shape("line", { class: kind, x1: LEFT, x2: WIDE - RIGHT, y1: y(bytes), y2: y(bytes) });
    parts.push(across(arena, "peak"), across(lower, "bound"));
    canvas.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
    canvas.replaceChildren(...parts);
    canvas.dataset.arena = arena;
    canvas.classList.remove("marked");
    note.textContent = `arena ${bytesText(arena)}, lower bound ${bytesText(lower)}, ${plan.tensors.length} tensors in ${steps} steps`;
  }

  function show(number) {
    if (chooser) chooser.selectedIndex = number;
    plan = data.memory[number];
    from = 0;
    to = plan.steps.length;
    draw();
  }

  data.memory.forEach((plan, number) => plan.tensors.forEach((tensor, k) => index.push({
    text: tensor.name, kind: "tensor in memory",
    go: () => {
      show(number);
      if (plan.steps.length > 200) {
        from = Math.max(tensor.first - 30, 0);
        to = Math.min(tensor.last + 30, plan.steps.length);
        draw();
      }
      mark([k]);
    },
  })));
  // These tensors stand out, until the next drawing.
  function mark(tensors) {
    const boxes = tensors.map(k => canvas.querySelector(`[data-tensor="${k}"]`)).filter(Boolean);
    canvas.classList.add("marked");
    for (const box of boxes) box.classList.add("found");
    if (boxes.length === 1) note.textContent = boxes[0].textContent.split("\n")[0];
    byId("memory").scrollIntoView();
  }

  // Zoom round a place between 0 and 1 of what is shown; move by a share of it.
  function zoom(factor, at) {
    const middle = from + (to - from) * at, whole = plan.steps.length;
    from = Math.max(middle - (middle - from) * factor, 0);
    to = Math.max(Math.min(middle + (to - middle) * factor, whole), from + Math.min(4, whole));
    draw();
  }
  function move(share) {
    const by = Math.min(Math.max(share * (to - from), -from), plan.steps.length - to);
    from += by;
    to += by;
    draw();
  }
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max(event.offsetX / canvas.clientWidth, 0), 1));
  }, { passive: false });
  canvas.addEventListener("pointermove", event => { if (event.buttons) move(-event.movementX / canvas.clientWidth); });
  canvas.addEventListener("dblclick", () => zoom(1e9, 0.5));
  const KEYS = { "+": () => zoom(0.8, 0.5), "-": () => zoom(1.25, 0.5), "0": () => zoom(1e9, 0.5), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
  canvas.addEventListener("keydown", event => {
    if (event.key === "Escape") canvas.blur();
    if (!KEYS[event.key]) return;
    KEYS[event.key]();
    event.preventDefault();
  });
  byId("steps-in").addEventListener("click", KEYS["+"]);
  byId("steps-out").addEventListener("click", KEYS["-"]);
  byId("steps-all").addEventListener("click", KEYS["0"]);

  chooser?.addEventListener("change", () => show(chooser.selectedIndex));
  all("[data-tensors]").forEach(button => button.addEventListener("click", () => {
    const kernel = +button.dataset.tensors;
    show(Math.max(data.memory.findIndex(plan => plan.tensors.some(tensor => tensor.kernel === kernel)), 0));
    const own = plan.tensors.flatMap((tensor, k) => tensor.kernel === kernel ? [k] : []);
    mark(own);
    note.textContent = `${own.length} tensors of ${byId(`kernel-${kernel}`).dataset.find}`;
  }));
  window.addEventListener("resize", draw);
  listeners.push(draw);
  refresh();
  followHash();
})();
