// openai-node, unmodified: what its stream helper makes of a stream is the whole answer, for chats and completions.
//   node openai_node.mjs HOST:PORT
import assert from 'node:assert/strict'
import OpenAI from 'openai'

const client = new OpenAI({ baseURL: `http://${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'Once upon a time' }]
const model = (await client.models.list()).data[0].id
let count = 0

for (const n of [1, 3]) {
  for (const top of [null, 0, 2]) {
    const asked = { model, n, seed: 5, max_tokens: 24 }
    const scored = top === null ? asked : { ...asked, logprobs: true, top_logprobs: top }
    const whole = await client.chat.completions.create({ ...scored, messages })
    const stream = client.chat.completions.stream({ ...scored, messages, stream_options: { include_usage: true } })
    const roles = []
    stream.on('chunk', (chunk) => chunk.choices.forEach(({ delta }) => delta.role && roles.push(delta.role)))
    const final = await stream.finalChatCompletion()
    assert.deepEqual(roles, Array(n).fill('assistant'))
    const plain = ({ index, finish_reason, logprobs, message: { role, content } }) =>
      ({ index, finish_reason, role, content: content ?? '', scores: logprobs?.content ?? null })
    assert.deepEqual(final.choices.map(plain), whole.choices.map(plain))
    assert.deepEqual(final.usage, whole.usage)

    const prompt = { ...asked, prompt: 'The lamp\u2028\u2029\u0085\u001e\f of', echo: true, ...(top === null ? {} : { logprobs: top }) }
    const all = await client.completions.create(prompt)
    const parts = Array.from({ length: n }, () => ({ text: '', tokens: [], token_logprobs: [], text_offset: [] }))
    for await (const { choices } of await client.completions.create({ ...prompt, stream: true })) {
      for (const { index, text, logprobs } of choices) {
        parts[index].text += text
        for (const name of ['tokens', 'token_logprobs', 'text_offset']) parts[index][name].push(...(logprobs?.[name] ?? []))
      }
    }
    for (const { index, text, logprobs } of all.choices) {
      const { tokens = [], token_logprobs = [], text_offset = [] } = logprobs ?? {}
      assert.deepEqual(parts[index], { text, tokens, token_logprobs, text_offset })
      assert(text.startsWith('The lamp\u2028\u2029\u0085\u001e\f of'))
    }
    count += 2
  }
}
await assert.rejects(client.chat.completions.create({ model, messages, top_p: 7 }), (error) => error.status === 400 && error.param === 'top_p')
console.log(`${count} streams make the whole answers`)
