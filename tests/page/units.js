// Tests of the page's modules without a server, run by `make page-check`: `load(path)` imports a module, `check(name, passed)` notes.
(async ({ load, check, equal }) => {
  const { EventParser } = await load('api.js');
  const { Monitor, readRuns, rates, hitRates } = await load('see/monitor.js');
  const { promptText } = await load('see/queue.js');
  const { layoutTree } = await load('see/tree_layout.js');
  const { layoutCells } = await load('see/blocks.js');
  const { Conversation, deleteConversations, importConversations, keepConversation, loadConversation, restoreConversations } = await load('talk/conversations.js');
  const { MarkdownView } = await load('talk/markdown.js');
  const { pythonLiteral, asCurl, requestBody } = await load('talk/request.js');
  const { Answer, requestAnswer } = await load('talk/answer.js');
  const { readExport } = await load('talk/exchange.js');
  const { ReplaySource } = await load('see/sources.js');
  const { kept } = await load('storage.js');

  const stream = 'data: {"a": 1}\n\n: comment\r\n\r\ndata: two\ndata: lines\n\ndata:[DONE]\n\n';
  for (let size = 1; size <= stream.length; size += 1) {
    const parser = new EventParser();
    const events = [];
    for (let at = 0; at < stream.length; at += size) events.push(...parser.feed(stream.slice(at, at + size)));
    equal(`events in pieces of ${size}`, events, ['{"a": 1}', 'two\nlines', '[DONE]']);
  }

  equal('runs of blocks', [...readRuns('F*120,U:3*4,C,P*2')], [[0, 0, 120], [2, 3, 4], [1, 0, 1], [4, 0, 2]]);
  equal('no runs', [...readRuns('')], []);
  let refused = false;
  try {
    [...readRuns('Q*3')];
  } catch {
    refused = true;
  }
  check('an unknown state is refused', refused);

  const pool = { name: 'full', block_size: 16, num_blocks: 10, num_free: 4, num_idle: 1, num_host_blocks: 0, num_host_used: 0 };
  const totals = { prompt_tokens: 0, output_tokens: 0, cached_tokens: 0, queried_tokens: 0, preemptions: 0, finished: 0 };
  const update = (more) => ({ full: false, at: 1, step: 1, sees: 'all', pools: [pool], blocks: [], host_blocks: [], requests: [], num_running: 0, num_waiting: 0,
    tree: { nodes: [], evicted: [], num_nodes: 0, shown: 0 }, steps: [], totals, ...more });
  const request = { id: 'a', seq: 0, state: 'running', num_output: 0, since: 0, owner: 3 };
  const monitor = new Monitor();
  monitor.apply(update({ full: true, blocks: [[0, 0, 'F*10']], requests: [request], tree: { nodes: [[1, -1, 0, 0, 0, 0, 0, 0, 0, ''], [2, 1, 9, 1, 4, 0, 0, 0, 0, '']], evicted: [], num_nodes: 2, shown: 2 } }));
  monitor.apply(update({ at: 3, blocks: [[0, 2, 'U:3*2'], [0, 9, 'C']], requests: [{ ...request, num_output: 1 }], tree: { nodes: [], evicted: [2], num_nodes: 1, shown: 1 },
    totals: { ...totals, output_tokens: 10, queried_tokens: 8, cached_tokens: 2 } }));
  equal('changed blocks', [...monitor.pools[0].device.state], [0, 0, 2, 2, 0, 0, 0, 0, 0, 1]);
  equal('owners', [...monitor.pools[0].device.owner], [0, 0, 3, 3, 0, 0, 0, 0, 0, 0]);
  equal('time to the first token', monitor.firstTokens, [3]);
  equal('an evicted node leaves the tree', [monitor.nodes.has(2), monitor.evicted.map((one) => one.node.id)], [false, [2]]);
  const whole = update({ full: true, at: 3, requests: [{ ...request, num_output: 1 }] });
  const rejoined = new Monitor();
  rejoined.apply(update({ full: true, at: 1, requests: [request] }));
  rejoined.apply(whole);
  equal('no first token of a time without updates', rejoined.firstTokens, []);
  rejoined.apply(update({ at: 5, requests: [{ ...request, id: 'b', since: 4, num_output: 1 }, { ...request, id: 'c', since: 2, num_output: 9 }] }));
  equal('a first token between two updates', rejoined.firstTokens, [1]);
  rejoined.apply(update({ full: true, at: 6, totals: { ...totals, finished: 3 } }));
  rejoined.apply(update({ full: true, at: 7 }));
  equal('another engine begins anew', [rejoined.samples.length, rejoined.finished], [1, []]);
  equal('the tree of an earlier time', monitor.treeAt(1).nodes.map((node) => node.id), [1, 2]);
  equal('rates', rates(monitor.samples, 'output_tokens'), [{ at: 3, value: 5 }]);
  equal('rates without a part', rates([{ at: 0, totals }, { at: 2, totals: { ...totals, prompt_tokens: 9, cached_tokens: 4 } }], 'prompt_tokens', 'cached_tokens'), [{ at: 2, value: 2.5 }]);
  equal('a prompt that runs, and one that is done', [18400, 61178].map((done) => promptText({ num_prompt: 61178, num_prompt_done: done })), ['18,400 / 61,178', '61,178']);
  equal('hit rate', hitRates(monitor.samples), [{ at: 3, value: 0.25 }]);
  monitor.apply(update({ at: 4 }));
  equal('a request that left', monitor.finished.map((one) => [one.id, one.left]), [['a', 4]]);
  for (let at = 5; at < 2000; at += 1) monitor.apply(update({ at, requests: [{ ...request, id: `r${at}` }], steps: [[at, at, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]] }));
  check('the history is bounded', monitor.snapshots.length <= 300 && monitor.samples.length <= 600 && monitor.finished.length <= 100 && monitor.steps.length <= 256);

  const hybrid = new Monitor();
  const states = { ...pool, name: 'delta state', block_size: 0, num_blocks: 30, num_free: 0, num_idle: 30 };
  hybrid.apply(update({ full: true, pools: [pool, states], blocks: [[0, 0, 'F*10'], [1, 0, 'C*30']], tree: { nodes: [[1, -1, 9, 1, 4, 0, 0, 0, 0, '', 2]], evicted: [], num_nodes: 1, shown: 1 } }));
  equal('blocks of states do not count as KV blocks', [hybrid.samples[0].used, hybrid.samples[0].cached], [0.5, 0.1]);
  equal('snapshots of a node', hybrid.nodes.get(1).snapshots, 2);

  const node = (id, parent, tokens) => ({ id, parent, tokens, created: id });
  const tree = layoutTree([node(1, -1, 10), node(2, 1, 20), node(3, 1, 30), node(4, 2, 40)]);
  const place = Object.fromEntries(tree.placed.map((one) => [one.id, [one.x0, one.x1, one.y0, one.y1]]));
  equal('places of nodes', place, { 1: [0, 10, 0, 2], 2: [10, 30, 0, 1], 3: [10, 40, 1, 2], 4: [30, 70, 0, 1] });
  const chain = layoutTree(Array.from({ length: 20000 }, (_, index) => node(index + 1, index || -1, 1)));
  check('a chain of 20,000 nodes is laid out', chain.placed.length === 20000 && chain.rows === 1);

  for (const [blocks, width, height] of [[1, 700, 300], [2298, 743, 352], [16384, 743, 352], [100000, 743, 352], [100000, 340, 260]]) {
    const { perCell, numCells, across, down, columns, rows } = layoutCells(blocks, width, height);
    check(`${blocks} blocks fill ${width} x ${height}`, numCells * perCell >= blocks && columns * rows >= numCells && rows * down <= height && columns * across <= width && (blocks < 2000 || rows * down > height - 1));
  }

  const conversation = new Conversation();
  const first = conversation.add('', { role: 'user', content: 'one' });
  const answer = conversation.add(first.id, { role: 'assistant', content: 'a' });
  const other = conversation.add(first.id, { role: 'assistant', content: 'b' });
  equal('the shown branch', conversation.path().map((one) => one.content), ['one', 'b']);
  conversation.choose(answer);
  const copy = new Conversation(JSON.parse(JSON.stringify(conversation)));
  equal('a kept conversation', copy.path().map((one) => one.content), ['one', 'a']);
  copy.remove(answer.id);
  equal('a removed branch', copy.path().map((one) => one.id), [first.id, other.id]);
  const third = copy.add(first.id, { role: 'assistant', content: 'c' });
  copy.choose(other);
  copy.remove(third.id);
  equal('the shown branch stays when another one is removed', copy.path().map((one) => one.content), ['one', 'b']);

  const begun = copy.add(first.id, { role: 'assistant', content: '', partial: true });
  equal('an answer that has begun is shown', copy.path().at(-1).id, begun.id);
  equal('the latest answer is shown if the chosen one was not kept', new Conversation(JSON.parse(JSON.stringify(copy))).path().map((one) => one.content), ['one', 'b']);
  copy.remove(begun.id);

  keepConversation(copy);
  copy.title = 'newer';
  keepConversation(copy);
  equal('the newest of a conversation is opened', loadConversation(copy.id).title, 'newer');
  deleteConversations([copy.id]);
  keepConversation(copy);
  equal('a deleted conversation stays deleted', loadConversation(copy.id), null);
  kept.set(`quire.chat.${copy.id}`, JSON.stringify(copy)); // as another tab does
  const again = loadConversation(copy.id);
  again.title = 'again';
  keepConversation(again);
  equal('a deleted conversation that another tab has kept again is kept', loadConversation(copy.id).title, 'again');
  deleteConversations([copy.id]);

  const [here, there] = [1, 2].map(() => new Conversation({ id: 'tabs', title: 'old', system: 'old' }));
  there.rename('new');
  there.setSystem('be brief');
  here.merge(new Conversation(JSON.parse(JSON.stringify(there))));
  there.merge(new Conversation({ id: 'tabs', title: 'old', system: 'old' }));
  equal('the newer title and system prompt stay', [here, there].map((one) => [one.title, one.system]), [['new', 'be brief'], ['new', 'be brief']]);

  const own = new Conversation();
  own.add('', { role: 'user', content: 'x'.repeat(1_000_000) });
  keepConversation(own);
  const strangers = Array.from({ length: 3 }, (_, index) => {
    const stranger = new Conversation({ id: `stranger${index}`, changed: Date.now() + 1000 });
    stranger.add('', { role: 'user', content: 'y'.repeat(400_000) });
    return stranger;
  });
  equal('an import is kept as far as it fits', importConversations(strangers), { number: 2, note: '' });
  check('an import drops nothing', loadConversation(own.id) && strangers.filter(({ id }) => loadConversation(id)).length === 2);
  const small = Array.from({ length: 120 }, (_, index) => new Conversation({ id: `small${index}` }));
  equal('an import keeps to the number of conversations', importConversations(small).number, 97);
  const later = new Conversation();
  check('a new conversation makes room', keepConversation(later).startsWith('Deleted to make room: the oldest') && loadConversation(later.id));
  deleteConversations([own, later, ...strangers, ...small].map(({ id }) => id));
  equal('deleted conversations are restored', [restoreConversations([own, later]), loadConversation(own.id).path().length], ['', 1]);
  deleteConversations([own.id, later.id]);

  const large = 'x'.repeat(11_000_000); // more than a browser keeps
  equal('a browser that keeps nothing', [kept.set('quire.large', large), kept.get('quire.large').length, kept.keys().includes('quire.large')], [false, large.length, true]);
  kept.remove('quire.large');
  equal('nothing is left', [kept.get('quire.large'), kept.keys().includes('quire.large')], [null, false]);

  const view = new MarkdownView();
  const text = '# Title\n\nSome *text* &amp; `code`\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n1. x\n   - y\n\n```js\nlet a;\n```\n\n<b onclick="x()">html</b>';
  for (let length = 1; length <= text.length; length += 1) view.show(text.slice(0, length));
  const inOne = new MarkdownView();
  inOne.show(text);
  equal('Markdown in pieces', view.element.innerHTML, inOne.element.innerHTML);
  check('no element from HTML', !inOne.element.querySelector('b, [onclick]') && inOne.element.textContent.includes('<b onclick='));
  check('blocks of Markdown', ['h3', 'em', 'code', 'table', 'ol ul', 'pre'].every((name) => inOne.element.querySelector(name)));
  const before = view.element.firstChild;
  view.show(`${text}\n\nmore`);
  check('unchanged blocks keep their elements', view.element.firstChild === before);
  const deep = new MarkdownView();
  deep.show('>'.repeat(20000));
  check('text that cannot be read stays text', deep.element.textContent.length > 0);

  const slow = new MarkdownView();
  const begin = performance.now();
  slow.show('_a_'.repeat(20000));
  check('emphasis that would take seconds to read stays text', performance.now() - begin < 1000 && !slow.element.querySelector('em'));

  for (const [name, hostile] of [['spaces', `a${' '.repeat(40000)}b`], ['an address', `${'a.'.repeat(20000)}@`], ['digits', `${'0'.repeat(40000)}@`],
    ['marks of many paragraphs', Array(63).fill('_a_'.repeat(990)).join('\n\n')]]) {
    const start = performance.now();
    new MarkdownView().show(hostile);
    check(`${name} that would take seconds to read stay text`, performance.now() - start < 300);
  }
  const usual = new MarkdownView();
  usual.show(`${'Some *text* of `code` and words.\n\n'.repeat(1000)}${'x'.repeat(1500)}`);
  check('long text is read', usual.element.querySelectorAll('em').length === 1000);

  const said = (role, content, more) => ({ role, content, ...more });
  const asked = requestBody({ model: 'm', system: '', path: [said('user', 'a'), said('assistant', '', { error: 'lost', reasoning: 'hm' }), said('user', 'b')],
    settings: { sampling: () => ({}), schema: () => null, tools: () => null, get: () => '' } });
  equal('a failed answer is no turn', asked.messages.map((one) => one.content), ['a', 'b']);

  const { fetch } = window;
  const numSteps = 100;
  try {
    window.fetch = async (url) => {
      const [start, number] = ['first', 'count'].map((name) => Number(new URL(url).searchParams.get(name)));
      const steps = Array.from({ length: Math.min(number, 5, numSteps - start) }, (_, index) => start + index); // an answer that ends early
      return new Response(JSON.stringify({ num_steps: numSteps, steps }));
    };
    const source = new ReplaySource();
    await source.open();
    equal('steps of answers that end early', await source.updatesTo(63, null), Array.from({ length: 64 }, (_, index) => index));
    equal('the last steps', await source.updatesTo(99, 95), [96, 97, 98, 99]);
    window.fetch = async () => new Response('data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n');
    const cut = await requestAnswer({}, null, () => {});
    equal('a stream without an end', [cut.content, cut.error], ['a', 'The stream ended early.']);
  } finally {
    window.fetch = fetch;
  }

  equal('a Python literal', pythonLiteral({ a: [1, true, null, 'x"\n'] }), '{"a": [1, True, None, "x\\"\\n"]}');
  check('quotes in curl', asCurl({ a: "it's" }, false).includes("it'\\''s"));

  const { Runs } = await load('talk/runs.js');
  const endless = new Conversation();
  const asking = endless.add('', { role: 'user', content: 'x'.repeat(2_000_000) });
  const notes = [];
  const bodyOfOne = new ReadableStream({ start: (controller) => controller.enqueue(new TextEncoder().encode('data: {"choices": [{"delta": {"content": "a"}}]}\n\n')) });
  try {
    window.fetch = async () => new Response(bodyOfOne);
    await new Promise((resolve) => {
      const runs = new Runs({ onGrow: (run) => run.node.content && resolve(), onKept: (note) => notes.push(note), onEnd: () => {} });
      runs.start(endless, asking.id, {}, () => '');
    });
    window.dispatchEvent(new Event('pagehide')); // keeps what grows
    window.dispatchEvent(new Event('pageshow'));
  } finally {
    window.fetch = fetch;
  }
  check('a note says that a growing answer is not kept', notes.length === 1 && notes[0].includes('too long'));

  const { Log } = await load('talk/log.js');
  let paints = 0;
  const growth = { grow: () => {
    paints += 1;
    for (const start = performance.now(); performance.now() - start < 10;);
  } };
  const painter = new Log().painter(growth, { node: { content: '' } });
  const rest = () => new Promise((resolve) => setTimeout(resolve, 200));
  painter.draw();
  await rest();
  equal('an answer is painted only after something has arrived', paints, 1);
  painter.draw();
  painter.draw();
  await rest();
  equal('what arrives together is painted once', paints, 2);

  const { tokenView } = await load('talk/tokens.js');
  const viewOfEvents = tokenView({ tokens: [{ text: 'two tokens', logprob: null, top: [], draft: true, event: 0 }] });
  equal('the label without probabilities', viewOfEvents.querySelector('.token-text').getAttribute('aria-label'), 'Text of 1 event, without probabilities');
  check('no percentages without probabilities', !viewOfEvents.textContent.includes('%'));
  viewOfEvents.querySelector('.token-text .token').click();
  check('an event has accepted drafts', viewOfEvents.querySelector('.token-readout').textContent.includes('has accepted drafts'));

  const rows = (tokens) => tokens && { content: tokens.map((token) => ({ token, logprob: -0.1, top_logprobs: [] })) };
  const chunk = (delta, tokens, drafted = [], usage = undefined) => ({ choices: [{ delta, logprobs: rows(tokens), finish_reason: null, drafted }], usage });
  const grown = new Answer(true);
  grown.add(chunk({ role: 'assistant', content: '' }, null));
  grown.add(chunk({ reasoning_content: 'hm', reasoning: 'hm' }, ['hm'], [], { completion_tokens: 1 }));
  grown.add(chunk({ reasoning: '.' }, null, [], { completion_tokens: 4 })); // text of tokens that the next event lists
  grown.add(chunk({ content: 'two tokens' }, ['.', 'two', ' tokens'], [1], { completion_tokens: 4 }));
  grown.add(chunk({ tool_calls: [{ index: 0, id: 'c', function: { name: 'f', arguments: '{"a"' } }] }, null, [], { completion_tokens: 6 }));
  grown.add(chunk({ tool_calls: [{ index: 0, function: { arguments: ': 1}' } }] }, ['{"a"', ': 1}'], [], { completion_tokens: 6 }));
  const message = grown.message();
  equal('an answer in pieces', [message.content, message.reasoning, message.tool_calls[0].function, message.figures.drafts, message.figures.tokens],
    ['two tokens', 'hm.', { name: 'f', arguments: '{"a": 1}' }, 1, 6]);
  equal('each token once', [grown.tokens.map((token) => token.text), grown.events], [['hm', '.', 'two', ' tokens', '{"a"', ': 1}'], [1, 3, 2]]);
  equal('the accepted draft', grown.tokens.filter((token) => token.draft).map((token) => token.text), ['two']);
  const plain = new Answer(false);
  plain.add(chunk({ content: 'two tokens' }, null, [], { completion_tokens: 2 }));
  plain.add(chunk({ content: '!' }, null, [1], { completion_tokens: 2 }));
  equal('the drafts of a step with several events', [plain.drafts, plain.tokens[0].draft], [1, true]);
  equal('tokens without probabilities', [plain.tokens.map((token) => token.text), plain.events], [['two tokens!'], [2]]);

  const growing = new Conversation();
  const question = growing.add('', { role: 'user', content: 'q' });
  const part = growing.add(question.id, { role: 'assistant', content: '', partial: true });
  equal('an answer without text is not kept', JSON.parse(JSON.stringify(growing)).nodes.length, 1);
  part.content = 'one';
  const elsewhere = new Conversation(JSON.parse(JSON.stringify(growing)));
  Object.assign(part, { content: 'one two' });
  delete part.partial;
  growing.merge(elsewhere);
  equal('a whole answer stays', growing.nodes.get(part.id).content, 'one two');
  elsewhere.merge(growing);
  equal('another tab takes the whole answer', [elsewhere.nodes.get(part.id).content, elsewhere.nodes.get(part.id).partial], ['one two', undefined]);

  const written = JSON.stringify([growing]);
  equal('Import reads what Export wrote', new Conversation(readExport(written)[0]).path().map((one) => one.content), ['q', 'one two']);
  const wrong = (change) => {
    const [copied] = JSON.parse(written);
    change(copied);
    try {
      return readExport(JSON.stringify(copied)).length;
    } catch (error) {
      return error.message.endsWith('Import reads what Export wrote.');
    }
  };
  check('a message is below an earlier one', wrong((one) => one.nodes.reverse()) === true);
  check('an id is an id', wrong((one) => (one.id = 'a"]')) === true);
  check('a role is a known one', wrong((one) => (one.nodes[0].role = 'system')) === true);
  check('a figure is a number', readExport(JSON.stringify({ id: 'a', nodes: [{ id: 'b', parent: '', role: 'assistant', content: '', figures: { tokens: '<b>' } }] }))[0].nodes[0].figures.tokens === null);
  const [odd] = JSON.parse(written);
  odd.chosen.push([odd.nodes[1].id, odd.nodes[0].id]);
  odd.title = odd.system = { toString: 1 };
  equal('a title that is no text', readExport(JSON.stringify(odd)).map(({ title, system }) => [title, system]), [['', '']]);
  equal('what is chosen is a child', readExport(JSON.stringify(odd))[0].chosen, growing.toJSON().chosen);
  odd.chosen = [[1, 2], 'a'];
  equal('a file without a choice shows the latest messages', new Conversation(readExport(JSON.stringify(odd))[0]).path().map((one) => one.content), ['q', 'one two']);
})
