// Vercel's AI SDK with its OpenAI-compatible provider: texts, objects of a schema and calls of tools, whole and streamed.
//   node ai_sdk.mjs HOST:PORT
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, streamText, tool } from 'ai'
import { z } from 'zod'

const provider = createOpenAICompatible({ name: 'ppserve', baseURL: `http://${process.argv[2]}/v1`, supportsStructuredOutputs: true })
const asked = { model: provider('tiny'), prompt: 'Once upon a time', seed: 3, maxRetries: 0, maxOutputTokens: 300 }
const animal = z.object({ kind: z.enum(['cat', 'dog']), legs: z.literal(4) })
const weather = tool({ description: 'Tells it.', inputSchema: z.object({ city: z.enum(['Bern', 'Rome']) }) })

const short = { ...asked, maxOutputTokens: 30 }
const { text, usage } = await generateText(short)
assert(text.length > 0 && usage.outputTokens === 30)
let streamed = ''
for await (const piece of streamText(short).textStream) streamed += piece
assert.equal(streamed, text)

const formed = { ...asked, output: Output.object({ schema: animal }) }
const { output } = await generateText(formed)
assert.equal(output.legs, 4)
assert.deepEqual(await streamText(formed).output, output)

const forced = { ...asked, tools: { weather }, toolChoice: { type: 'tool', toolName: 'weather' } }
const { toolCalls } = await generateText(forced)
assert(toolCalls.length > 0 && toolCalls.every(({ toolName, input }) => toolName === 'weather' && ['Bern', 'Rome'].includes(input.city)))
const plain = (calls) => calls.map(({ toolCallId, toolName, input }) => ({ toolCallId, toolName, input }))
assert.deepEqual(plain(await streamText(forced).toolCalls), plain(toolCalls))
const version = (name) => `${name} ${JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version}`
console.log(`${version('ai')}, ${version('@ai-sdk/openai-compatible')}: texts, an object and calls, whole and streamed`)
