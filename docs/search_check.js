// Pastes the messages of the errors page into the search of the built site, as a reader would, by the site's own worker:
// `node docs/search_check.js site` fails unless a heading leads to its section, and a whole message to one of the
// first three that are found. Opened as files, pages may have no network: they must load nothing from elsewhere, and
// find the index as a script.
const fs = require("fs"), path = require("path"), vm = require("vm")

const site = path.resolve(process.argv[2])
const folder = path.join(site, "assets/javascripts/workers")
const worker = path.join(folder, fs.readdirSync(folder).find((name) => /^search.*\.js$/.test(name)))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))

let receive, answered
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => (receive = listener)
globalThis.postMessage = (answer) => answered(answer)
vm.runInThisContext(fs.readFileSync(worker, "utf8"))
const ask = (data) => new Promise((done) => ((answered = done), receive({ data })))

// In the repository: a heading that is a message, the text that code raises below it, and the rows of the last table.
const sections = fs.readFileSync(path.join(__dirname, "errors.md"), "utf8").split(/^## /m).slice(1)
const raised = /```python raises\n[^]*?```\s+```text\n([^]*?)```/
const pasted = sections.flatMap((section) => {
  const heading = section.split("\n")[0].replace(/`/g, " ").trim()
  const message = section.match(raised)
  return [
    ...(section.startsWith("`") ? [{ heading, text: heading, within: 1 }] : []),
    ...(message ? [{ heading, text: message[1].replace(/\s+/g, " "), within: 3 }] : []),
    ...[...section.matchAll(/^(?:\| |- )(`.*?`)(?: \||;|$)/gm)].map(([, text]) => ({ heading: text, text, within: 5 })),
  ]
})
const words = (text) => text.replace(/<[^>]*>|&\w+;|\W/g, "")

async function main() {
  await ask({ type: 0, data: { config: index.config, docs: index.docs, options: {} } })
  const lost = []
  for (const { heading, text, within } of pasted) {
    const { data } = await ask({ type: 2, data: text })
    const found = (data.items[0] || []).filter(({ location }) => location.includes("#")).slice(0, within)
    const is_there = ({ location, title }) => location.startsWith("errors.html#") && words(title) === words(heading)
    if (!found.some(is_there)) lost.push(`${text}\n    -> ${found.map(({ location }) => location)}`)
  }
  const first = fs.readFileSync(path.join(site, "index.html"), "utf8")
  lost.push(...(first.match(/<(script|img|link rel="stylesheet")[^>]*(src|href)="https?:[^"]*"/g) || []))
  if (!fs.existsSync(path.join(site, "search/search_index.js"))) lost.push("search/search_index.js is not there")
  console.log(`${pasted.length} messages pasted into search, ${lost.length} faults`)
  lost.forEach((line) => console.log(line))
  process.exit(pasted.length && !lost.length ? 0 : 1)
}
main()
