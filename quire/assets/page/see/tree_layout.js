// Where the nodes of the radix tree lie: from left to right by tokens, leaves in rows, a parent as high as its children.

const MIN_TOKENS = 5; // a node with fewer is drawn as wide as this, to be seen at all

/** Places nodes: adds `x0`, `x1` in tokens and `y0`, `y1` in rows. Returns `{placed, tokens, rows, byId}`, parents before children. */
export function layoutTree(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, { ...node, children: [] }]));
  const roots = [];
  for (const node of byId.values()) {
    const parent = byId.get(node.parent);
    if (parent && parent !== node) parent.children.push(node);
    else roots.push(node);
  }
  const placed = [];
  const older = (one, other) => one.created - other.created || one.id - other.id;
  const open = roots.sort(older).reverse().map((node) => [node, 0]);
  let tokens = 0;
  while (open.length) {
    const [node, x0] = open.pop();
    node.x0 = x0;
    node.x1 = x0 + Math.max(MIN_TOKENS, node.tokens);
    tokens = Math.max(tokens, node.x1);
    placed.push(node);
    node.children.sort(older);
    for (let index = node.children.length - 1; index >= 0; index -= 1) open.push([node.children[index], node.x1]);
  }
  let rows = 0;
  for (const node of placed) {
    node.y0 = rows;
    if (!node.children.length) rows += 1;
  }
  for (let index = placed.length - 1; index >= 0; index -= 1) {
    const node = placed[index];
    node.y1 = node.children.length ? node.children.at(-1).y1 : node.y0 + 1;
  }
  return { placed, tokens, rows, byId };
}
