/* Search runs in a worker, which a browser refuses to a page that was opened from disk. There, and only there, this runs
   the worker's script in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.waiting = []
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.load(url).then(() => {
        for (const data of this.waiting.splice(0)) this.deliver(data)
        this.waiting = null
      })
    }
    load(url) {
      const script = this.inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      const loaded = new Promise(resolve => script.addEventListener("load", resolve))
      this.inside.document.body.appendChild(script)
      return loaded
    }
    deliver(data) {
      setTimeout(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
