// Lets the search of the pages work where they are opened as files. A browser starts no worker from
// a file, so its script runs in a hidden frame instead. Nothing is fetched from the network.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = new URL(url, location.href)
      this.ready = new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
      })
      inner.document.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })),
      )
    }
    terminate() {
      this.frame.remove()
    }
  }
