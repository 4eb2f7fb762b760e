// Search runs in a Worker, and browsers refuse one to a page that is opened as a file: there it runs in a hidden frame.
// (The offline plugin would load a script of this name from elsewhere, which needs a network.)
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<body></body>"
      this.inside = new Promise((ready) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => ready(inside)
          inside.document.body.append(script)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
