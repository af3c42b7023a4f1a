// The graphs, drawn in layers: values flow downwards. Groups (a kernel's calls, a branch, a scope of the model's source)
// are one box until they are opened. The layout is made here, as it changes with what is open.

(() => {
  const drawing = byId("drawing"), panel = byId("node"), which = byId("which"), level = byId("level");
  const FAR_SPAN = 7; // an edge over more layers is only drawn when one of its ends is chosen
  const LAYER = 66, BOX = 36, GAP = 22, MANY = 350;
  const greeting = panel.innerHTML;

  let graph = null, layout = null, chosen = null, view = { x: 0, y: 0, scale: 1 };

  // ---- groups: each node has a path of groups, outermost first

  const scopeOf = node => {
    const path = /'(\/?[^']*\/[^']*)'/.exec(node.loc ?? "")?.[1];
    return path ? path.split("/").filter(Boolean).slice(0, -1) : [];
  };

  function prepare(name) {
    const nodes = data.graphs[name].map((node, id) => ({ ...node, id, reads: node.reads ?? [], path: [] }));
    const groups = new Map(); // key -> { key, label, node: the box's own node or null, depth, size }
    const grow = (key, label, node, depth) => {
      if (!groups.has(key)) groups.set(key, { key, label, node, depth, size: 0, first: Infinity });
      return key;
    };
    for (const node of nodes) {
      if (node.inside !== undefined) {
        const parent = nodes[node.inside];
        node.path = [...parent.path, grow(`node ${parent.id}`, parent.what, parent, parent.path.length)];
      } else {
        let key = "";
        node.path = scopeOf(node).map((part, depth) => grow(key += `/${part}`, part, null, depth));
      }
      for (const key of node.path) groups.get(key).size++;
    }
    for (const node of nodes) {
      node.path = node.path.filter(key => groups.get(key).node || groups.get(key).size > 1);
      for (const key of node.path) groups.get(key).first = Math.min(groups.get(key).first, node.id);
      node.readers = [];
    }
    for (const node of nodes) for (const read of node.reads) nodes[read].readers.push(node.id);
    const last = new Map(); // of an opened kernel: the call that gives its result
    for (const node of nodes) if (node.inside !== undefined) last.set(node.inside, node.id);
    return { name, nodes, groups, last, open: new Set() };
  }

  // What stands for a node: the outermost closed group that holds it, or the node itself.
  function boxOf(node) {
    const closed = node.path.find(key => !graph.open.has(key));
    if (closed) return closed;
    if (isOpenKernel(node)) return boxOf(graph.nodes[graph.last.get(node.id)]);
    const own = `node ${node.id}`;
    return graph.groups.has(own) && !graph.open.has(own) ? own : node.id;
  }

  // Its calls are drawn in its place, and the last of them gives its result.
  const isOpenKernel = node => node.kind === "kernel" && graph.last.has(node.id) && graph.open.has(`node ${node.id}`);

  function levels() {
    const depths = [...graph.groups.values()].filter(group => !group.node).map(group => group.depth);
    const found = [];
    for (let depth = 0; depth <= Math.max(-1, ...depths); depth++)
      found.push({ text: `scopes to depth ${depth + 1}`, opens: group => !group.node && group.depth < depth });
    if (graph.name === "compiled") found.push({ text: "one box per kernel", opens: group => !group.node });
    found.push({ text: "every operator", opens: () => true });
    return found;
  }

  function setLevel(number) {
    const { opens } = levels()[number];
    graph.open = new Set([...graph.groups.values()].filter(opens).map(group => group.key));
  }

  function usualLevel() {
    const found = levels();
    if (graph.name === "compiled") {
      const kernels = found.length - 2;
      setLevel(kernels);
      if (new Set(graph.nodes.map(boxOf)).size <= 1500) return kernels;
    }
    for (let k = found.length - 1; k > 0; k--) {
      setLevel(k);
      if (new Set(graph.nodes.map(boxOf)).size <= MANY) return k;
    }
    return found.length === 1 ? 0 : graph.name === "compiled" ? found.length - 2 : 0;
  }

  // ---- layout: layers by longest path, order by the mean of the neighbours, places by least squares

  function makeLayout() {
    const boxes = new Map();
    for (const node of graph.nodes) {
      const key = boxOf(node);
      if (!boxes.has(key)) boxes.set(key, newBox(key));
      boxes.get(key).count++;
    }
    const order = [...boxes.values()].sort((a, b) => a.order - b.order);
    const edges = new Map();
    for (const node of graph.nodes) for (const read of isOpenKernel(node) ? [] : node.reads) {
      let from = boxes.get(boxOf(graph.nodes[read])), to = boxes.get(boxOf(node));
      if (from === to) continue;
      if (from.order > to.order) [from, to] = [to, from]; // what a collapsed group makes look like a cycle
      edges.set(`${from.key} ${to.key}`, { from, to });
    }
    for (const edge of edges.values()) { edge.from.out.push(edge); edge.to.in.push(edge); }
    for (const box of order) for (const { to } of box.out) to.rank = Math.max(to.rank, box.rank + 1);
    for (const box of order.slice().reverse())
      if (!box.in.length && box.out.length) box.rank = Math.min(...box.out.map(edge => edge.to.rank)) - 1;
    const layers = [];
    const put = item => (layers[item.rank] ??= []).push(item);
    order.forEach(put);
    for (const edge of edges.values()) {
      edge.far = edge.to.rank - edge.from.rank > FAR_SPAN;
      edge.points = [edge.from];
      for (let rank = edge.from.rank + 1; rank < edge.to.rank && !edge.far; rank++) {
        const bend = { rank, width: 6, up: [], down: [], x: 0 };
        edge.points.push(bend);
        put(bend);
      }
      edge.points.push(edge.to);
      if (!edge.far) for (let k = 1; k < edge.points.length; k++) {
        edge.points[k - 1].down.push(edge.points[k]);
        edge.points[k].up.push(edge.points[k - 1]);
      }
    }
    for (let k = 0; k < layers.length; k++) layers[k] ??= [];
    arrange(layers);
    return { boxes, edges: [...edges.values()], layers };
  }

  function newBox(key) {
    const group = typeof key === "string" ? graph.groups.get(key) : null, own = group ? group.node : graph.nodes[key];
    const label = group && !group.node ? group.label : own.what === "input" || own.what === "output" ? own.name : own.what;
    const text = label.length > 26 ? `${label.slice(0, 25)}\u2026` : label;
    return {
      key, group, node: own, text, kind: own ? own.kind : "op", count: 0, rank: 0, x: 0,
      order: group ? Math.min(group.first, group.node?.id ?? Infinity) : key, in: [], out: [], up: [], down: [],
      width: Math.max(64, Math.min(text.length * 7 + 20, 200)),
    };
  }

  const mean = (items, of) => items.reduce((sum, item) => sum + of(item), 0) / items.length;

  function arrange(layers) {
    layers.forEach(layer => layer.forEach((item, k) => item.place = k));
    const sweep = (layer, side) => {
      for (const item of layer) item.aim = item[side].length ? mean(item[side], other => other.place) : item.place;
      layer.sort((a, b) => a.aim - b.aim).forEach((item, k) => item.place = k);
    };
    for (let round = 0; round < 6; round++) {
      if (round % 2) for (let k = layers.length - 2; k >= 0; k--) sweep(layers[k], "down");
      else for (let k = 1; k < layers.length; k++) sweep(layers[k], "up");
    }
    for (const layer of layers) {
      const whole = layer.reduce((sum, item) => sum + item.width + GAP, 0);
      let x = -whole / 2;
      for (const item of layer) { item.x = x + item.width / 2; x += item.width + GAP; }
    }
    for (let round = 0; round < 10; round++) {
      const rows = round % 2 ? [...layers].reverse() : layers;
      for (const layer of rows) settle(layer, item => {
        const near = round < 8 ? (round % 2 ? item.down : item.up) : [...item.up, ...item.down];
        return near.length ? mean(near, other => other.x) : item.x;
      });
    }
  }

  // The places nearest to those wished for, in this order and without overlaps: pool adjacent violators.
  function settle(layer, wish) {
    const pools = [];
    let offset = 0;
    layer.forEach((item, k) => {
      if (k) offset += (layer[k - 1].width + item.width) / 2 + GAP;
      let pool = { sum: wish(item) - offset, count: 1, items: [[item, offset]] };
      while (pools.length && pools[pools.length - 1].sum / pools[pools.length - 1].count > pool.sum / pool.count) {
        const before = pools.pop();
        pool = { sum: before.sum + pool.sum, count: before.count + pool.count, items: before.items.concat(pool.items) };
      }
      pools.push(pool);
    });
    for (const pool of pools) for (const [item, at] of pool.items) item.x = pool.sum / pool.count + at;
  }

  // ---- drawing

  function draw() {
    layout = makeLayout();
    const top = shape("g", { class: "scene" }), lines = shape("g"), boxes = shape("g");
    for (const edge of layout.edges) {
      edge.line = shape("path", { class: edge.far ? "edge far" : "edge", d: edgePath(edge) });
      lines.append(edge.line);
      if (edge.far) {
        lines.append(shape("circle", { class: "stub", cx: edge.to.x - edge.to.width / 2 + 6, cy: edge.to.rank * LAYER - 3, r: 2.5 }));
        lines.append(shape("circle", { class: "stub", cx: edge.from.x + edge.from.width / 2 - 6, cy: edge.from.rank * LAYER + BOX + 3, r: 2.5 }));
      }
    }
    for (const box of layout.boxes.values()) boxes.append(drawBox(box));
    top.append(lines, boxes);
    drawing.replaceChildren(top);
    drawing.dataset.boxes = layout.boxes.size;
    byId("graph-size").textContent = `${layout.boxes.size} boxes for ${graph.nodes.length} nodes`;
    choose(null);
    heat();
    place();
  }

  function edgePath({ points, far }) {
    const at = points.map((item, k) => {
      const y = item.rank * LAYER;
      return k === 0 ? [[item.x, y + BOX]] : k === points.length - 1 ? [[item.x, y]] : [[item.x, y], [item.x, y + BOX]];
    }).flat();
    let path = `M${at[0].map(round)}`;
    for (let k = 1; k < at.length; k++) {
      const [[x0, y0], [x1, y1]] = [at[k - 1], at[k]], bend = far ? Math.min((y1 - y0) / 2, 200) : (y1 - y0) / 2;
      path += x0 === x1 && !far ? `L${round(x1)},${round(y1)}`
        : `C${round(x0)},${round(y0 + bend)} ${round(x1)},${round(y1 - bend)} ${round(x1)},${round(y1)}`;
    }
    return path;
  }
  const round = value => Math.round(value * 10) / 10;

  function drawBox(box) {
    const { node, group } = box, left = box.x - box.width / 2, y = box.rank * LAYER;
    const sub = group && !group.node ? `${box.count} nodes` : (node.type ?? "");
    const room = Math.floor(box.width / 5.6);
    const lines = [node?.name ?? group.key, node?.type, node?.loc].filter(Boolean).join("\n");
    box.item = shape("g", { class: `box ${box.kind}${group ? " group" : ""}`, "data-key": box.key },
      shape("rect", { x: round(left), y, width: box.width, height: BOX, rx: 5 }),
      shape("text", { x: round(box.x), y: y + 15, "text-anchor": "middle" }, box.text),
      shape("text", { class: "sub", x: round(box.x), y: y + 28, "text-anchor": "middle" }, sub.length > room ? `${sub.slice(0, room - 1)}\u2026` : sub),
      shape("title", {}, lines));
    box.item.addEventListener("click", () => choose(box));
    box.item.addEventListener("dblclick", event => { event.preventDefault(); toggle(box); });
    return box.item;
  }

  // Kernels by their cost per call at the symbols' values: the dearest one is darkest.
  function heat() {
    const boxes = [...layout.boxes.values()].filter(box => box.node?.kernel !== undefined && box.kind === "kernel");
    const calls = {};
    for (const node of graphs.compiled.nodes) if (node.kind === "kernel") calls[node.kernel] = (calls[node.kernel] ?? 0) + 1;
    const cost = box => (costShares[box.node.kernel] ?? 0) / (calls[box.node.kernel] ?? 1);
    const most = Math.max(...boxes.map(cost), 1e-12), shaded = byId("heat").checked;
    for (const box of boxes) {
      const share = Math.round(85 * Math.sqrt(cost(box) / most));
      box.item.firstChild.style.fill = shaded ? `color-mix(in srgb, var(--hot) ${share}%, var(--kernel))` : "";
    }
  }
  byId("heat").addEventListener("change", heat);
  listeners.push(heat);

  // ---- choosing a node, and what is known about it

  function choose(box) {
    chosen = box;
    all(".chosen, .near", drawing).forEach(item => item.classList.remove("chosen", "near"));
    if (!box) { panel.innerHTML = greeting; return; }
    box.item.classList.add("chosen");
    for (const edge of [...box.in, ...box.out]) {
      edge.line.classList.add("near");
      (edge.from === box ? edge.to : edge.from).item.classList.add("near");
    }
    panel.replaceChildren(...describe(box));
  }

  function describe(box) {
    const { node, group } = box;
    const parts = [element("h3", {}, group && !group.node ? group.label : node.what)], list = element("dl");
    const say = (what, ...values) => list.append(element("dt", {}, what), element("dd", {}, ...values));
    if (group && !group.node) say("scope", group.key);
    if (node) {
      say("name", node.name);
      say("type", node.type);
      if (node.loc) say("source", node.loc);
      if (node.constants) say("constants", String(node.constants));
      if (node.kernel !== undefined) {
        const name = byId(`kernel-${node.kernel}`).dataset.find, share = costShares[node.kernel];
        if (share !== undefined) say("cost of all its calls", `${(100 * share).toFixed(1)} % of all kernels`);
        say("kernel", element("a", { href: `#kernel-${node.kernel}` }, name));
      }
    }
    const near = (title, boxes) => {
      if (!boxes.length) return;
      const items = boxes.slice(0, 30).map(other => {
        const link = element("button", { type: "button" }, other.text);
        link.addEventListener("click", () => show(other));
        return element("li", {}, link, " ", other.node?.name ?? other.group.key);
      });
      if (boxes.length > 30) items.push(element("li", {}, `and ${boxes.length - 30} more`));
      list.append(element("dt", {}, title), element("dd", {}, element("ul", {}, ...items)));
    };
    near("reads", box.in.map(edge => edge.from));
    near("read by", box.out.map(edge => edge.to));
    parts.push(list);
    const inner = groupOf(box), outer = node?.path?.at(-1);
    const button = (text, action) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", action);
      parts.push(made, " ");
    };
    if (inner && !graph.open.has(inner)) button("Open", () => toggle(box));
    if (outer && graph.open.has(outer)) button("Close its group", () => close(outer));
    return parts;
  }

  const groupOf = box => box.group?.key ?? (graph.groups.has(`node ${box.key}`) ? `node ${box.key}` : null);

  function toggle(box) {
    const inner = groupOf(box);
    if (inner && !graph.open.has(inner)) {
      graph.open.add(inner);
      const first = graph.nodes.find(node => node.path.includes(inner));
      redraw(boxOf(first), box);
    } else if (box.node?.path?.length) close(box.node.path.at(-1));
  }

  function close(key) {
    graph.open.delete(key);
    const group = graph.groups.get(key);
    redraw(group.node ? boxOf(group.node) : key, chosen);
  }

  // Draw again with this box where the other one stood.
  function redraw(key, before) {
    const x = before ? before.x * view.scale + view.x : 80, y = before ? before.rank * LAYER * view.scale + view.y : 40;
    draw();
    const box = layout.boxes.get(key);
    if (!box) return;
    view.x = x - box.x * view.scale;
    view.y = y - box.rank * LAYER * view.scale;
    place();
    choose(box);
  }

  // ---- moving and zooming

  function place() {
    const scene = drawing.firstChild;
    scene.setAttribute("transform", `translate(${round(view.x)} ${round(view.y)}) scale(${view.scale})`);
    scene.classList.toggle("small", view.scale < 0.3);
  }

  const size = () => [drawing.clientWidth || 800, drawing.clientHeight || 500];

  function extent() {
    let left = 0, right = 1;
    for (const box of layout.boxes.values()) { left = Math.min(left, box.x - box.width / 2); right = Math.max(right, box.x + box.width / 2); }
    return { left, right, bottom: layout.layers.length * LAYER };
  }

  function fit(everything) {
    const { left, right, bottom } = extent(), [wide, high] = size();
    const scale = Math.min((wide - 30) / (right - left), everything ? (high - 30) / bottom : 1, 1.1);
    view.scale = Math.max(scale, everything ? 0.01 : 0.7);
    view.x = wide / 2 - (left + right) / 2 * view.scale;
    view.y = 20;
    if (!everything) { const first = layout.layers[0][0]; if (view.scale > scale && first) view.x = wide / 2 - first.x * view.scale; }
    place();
  }

  function zoom(factor, x = size()[0] / 2, y = size()[1] / 2) {
    const scale = Math.min(Math.max(view.scale * factor, 0.01), 4);
    view.x = x - (x - view.x) * scale / view.scale;
    view.y = y - (y - view.y) * scale / view.scale;
    view.scale = scale;
    place();
  }

  function show(box) {
    const [wide, high] = size();
    view.scale = Math.max(view.scale, 0.7);
    view.x = wide / 2 - box.x * view.scale;
    view.y = high / 2 - box.rank * LAYER * view.scale;
    place();
    choose(box);
  }

  drawing.addEventListener("wheel", event => {
    const focused = document.activeElement === drawing;
    if (!event.ctrlKey && !event.metaKey && !focused) return; // the page scrolls on, unless the drawing was clicked
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 0.87 : 1.15, event.offsetX, event.offsetY);
    else { view.x -= event.deltaX; view.y -= event.deltaY; place(); }
  }, { passive: false });
  drawing.addEventListener("pointermove", event => {
    if (!event.buttons) return;
    view.x += event.movementX;
    view.y += event.movementY;
    place();
  });
  const MOVES = { ArrowLeft: [80, 0], ArrowRight: [-80, 0], ArrowUp: [0, 80], ArrowDown: [0, -80] };
  drawing.addEventListener("keydown", event => {
    if (MOVES[event.key]) { view.x += MOVES[event.key][0]; view.y += MOVES[event.key][1]; place(); }
    else if (event.key === "+") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit(true);
    else if (event.key === "Enter" && chosen) toggle(chosen);
    else if (event.key === "Escape") drawing.blur();
    else return;
    event.preventDefault();
  });
  byId("zoom-in").addEventListener("click", () => zoom(1.25));
  byId("zoom-out").addEventListener("click", () => zoom(0.8));
  byId("zoom-width").addEventListener("click", () => fit(false));
  byId("zoom-all").addEventListener("click", () => fit(true));

  // ---- which graph, at which level

  const graphs = { imported: prepare("imported"), compiled: prepare("compiled") };

  function load(name) {
    graph = graphs[name];
    which.value = name;
    level.replaceChildren(...levels().map((item, k) => element("option", { value: k }, item.text)));
    level.value = usualLevel();
    setLevel(+level.value);
    draw();
    fit(false);
  }
  which.addEventListener("change", () => load(which.value));
  level.addEventListener("change", () => { setLevel(+level.value); draw(); fit(false); });

  function showNode(name, id) {
    if (graph.name !== name) load(name);
    const node = graph.nodes[id], box = layout.boxes.get(boxOf(node));
    byId("graph").scrollIntoView();
    show(box);
  }
  for (const [name, { nodes }] of Object.entries(graphs)) for (const node of nodes)
    if (node.inside === undefined || name === "imported")
      index.push({ text: `${node.name}: ${node.what}`, kind: `value, ${name}`, go: () => showNode(name, node.id) });
  all("[data-show]").forEach(button => button.addEventListener("click", () => {
    const node = graphs.compiled.nodes.find(item => item.kernel === +button.dataset.show && item.kind === "kernel");
    if (node) showNode("compiled", node.id);
  }));

  load("compiled");
})();
