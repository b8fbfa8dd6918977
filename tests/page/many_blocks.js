// Milliseconds to apply an update of 100,000 blocks and to draw them, the median of 15; run by `make page-check`.
(async (base) => {
  const { Monitor } = await import(`${base}see/monitor.js`);
  const { BlockMap } = await import(`${base}see/blocks.js`);
  const numBlocks = 100_000;
  const pool = { name: 'full', block_size: 16, num_blocks: numBlocks, num_free: 0, num_idle: 0, num_host_blocks: 0, num_host_used: 0 };
  const totals = { prompt_tokens: 0, output_tokens: 0, cached_tokens: 0, queried_tokens: 0, preemptions: 0, finished: 0 };
  const runs = (shift) => Array.from({ length: numBlocks / 4 }, (_, index) => `${'FCUSP'[(index + shift) % 5]}:${(index * 7) % 256}*4`).join(',');
  const update = (shift) => ({ full: true, at: shift, step: shift, sees: 'all', pools: [pool], blocks: [[0, 0, runs(shift)]], host_blocks: [], requests: [],
    num_running: 0, num_waiting: 0, tree: { nodes: [], evicted: [], num_nodes: 0, shown: 0 }, steps: [], totals });
  const view = new BlockMap({ explain: () => {}, onHighlight: () => {} });
  document.getElementById('main').replaceChildren(view.element);
  const monitor = new Monitor();
  const median = (list) => list.sort((one, other) => one - other)[Math.floor(list.length / 2)];
  const [applied, drawn] = [[], []];
  for (let shift = 1; shift <= 15; shift += 1) {
    const text = update(shift);
    const begin = performance.now();
    monitor.apply(text);
    applied.push(performance.now() - begin);
    const middle = performance.now();
    view.draw(monitor);
    drawn.push(performance.now() - middle);
  }
  return { apply: median(applied), draw: median(drawn), summary: document.getElementById('blocks-summary').textContent };
})
