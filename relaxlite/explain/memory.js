// The memory plan: steps to the right, offsets upwards, one rectangle per tensor.

(() => {
  if (!data.memory.length) { refresh(); followHash(); return; }

  const canvas = byId("timeline"), note = byId("memory-at"), chooser = byId("plan");
  const WIDE = 1200, HIGH = 380, LEFT = 70, RIGHT = 12, TOP = 14, BOTTOM = 26;
  const hue = k => `hsl(${k * 137.508 % 360} 60% 55%)`;
  let plan = data.memory[0];

  // Bytes alive in each step; tensors inside others count with them. The same as MemoryPlan.live_bytes.
  function liveBytes(plan) {
    const changes = new Array(plan.steps.length + 1).fill(0);
    for (const tensor of plan.tensors) {
      if (tensor.inside !== null) continue;
      changes[tensor.first] += figure(tensor.bytes);
      changes[tensor.last + 1] -= figure(tensor.bytes);
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
    const top = Math.max(arena, lower, 1) * 1.04;
    const x = step => LEFT + step / Math.max(steps, 1) * (WIDE - LEFT - RIGHT);
    const y = bytes => HIGH - BOTTOM - bytes / top * (HIGH - TOP - BOTTOM);
    const parts = [];
    for (let k = 0; k <= 4; k++) {
      const bytes = top / 1.04 * k / 4;
      parts.push(shape("line", { class: "axis", x1: LEFT, x2: WIDE - RIGHT, y1: y(bytes), y2: y(bytes) }));
      parts.push(shape("text", { class: "sub", x: LEFT - 6, y: y(bytes) + 4, "text-anchor": "end" }, bytesText(bytes)));
      const step = Math.round(steps * k / 4);
      parts.push(shape("text", { class: "sub", x: x(step), y: HIGH - 8, "text-anchor": k ? "end" : "start" }, `step ${step}`));
    }
    plan.tensors.forEach((tensor, k) => {
      const bytes = figure(tensor.bytes), offset = figure(tensor.offset);
      const title = `${tensor.name}: ${bytesText(bytes)} at ${bytesText(offset)}, steps ${tensor.first} to ${tensor.last}`
        + (tensor.inside ? `, inside ${tensor.inside}` : "") + `\n${plan.steps[tensor.first] ?? ""}\n${data.figures[tensor.bytes].text} bytes`;
      const box = shape("rect", {
        x: x(tensor.first), width: Math.max(x(tensor.last + 1) - x(tensor.first), 1), y: y(offset + bytes),
        height: Math.max(y(offset) - y(offset + bytes), 0), fill: hue(k), "data-tensor": k,
        "data-bytes": bytes, "data-offset": offset,
      }, shape("title", {}, title));
      if (tensor.inside !== null) box.setAttribute("fill-opacity", .35);
      box.addEventListener("pointerenter", () => note.textContent = title.split("\n")[0]);
      if (tensor.kernel !== null) box.addEventListener("click", () => { location.hash = `kernel-${tensor.kernel}`; followHash(); });
      parts.push(box);
    });
    const line = live.map((bytes, step) => `${x(step)},${y(bytes)} ${x(step + 1)},${y(bytes)}`).join(" ");
    parts.push(shape("polyline", { class: "live", points: line }));
    const across = (bytes, kind) => shape("line", { class: kind, x1: LEFT, x2: WIDE - RIGHT, y1: y(bytes), y2: y(bytes) });
    parts.push(across(arena, "peak"), across(lower, "bound"));
    canvas.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
    canvas.replaceChildren(...parts);
    canvas.dataset.arena = arena;
    note.textContent = `arena ${bytesText(arena)}, lower bound ${bytesText(lower)}, ${plan.tensors.length} tensors in ${steps} steps`;
  }

  function show(number) {
    if (chooser) chooser.selectedIndex = number;
    plan = data.memory[number];
    draw();
  }

  data.memory.forEach((plan, number) => plan.tensors.forEach((tensor, k) => index.push({
    text: tensor.name, kind: "tensor in memory",
    go: () => {
      show(number);
      all("#timeline .found").forEach(other => other.classList.remove("found"));
      const box = document.querySelector(`#timeline [data-tensor="${k}"]`);
      box?.classList.add("found");
      if (box) note.textContent = box.textContent.split("\n")[0];
      byId("memory").scrollIntoView();
    },
  })));
  chooser?.addEventListener("change", () => show(chooser.selectedIndex));
  listeners.push(draw);
  refresh();
  followHash();
})();
