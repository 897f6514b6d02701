// Pages opened from disk may not start workers, which the search needs: run the worker's script in a hidden frame.
// Same interface as the package iframe-worker, which would be loaded from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const scope = this.frame.contentWindow
      scope.document.open()
      scope.document.write("<!doctype html><html><body></body></html>")
      scope.document.close()
      const base = new URL(url, location.href)
      const load = address => new Promise((resolve, reject) => {
        const script = scope.document.createElement("script")
        script.src = new URL(address, base)
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${address}`))
        scope.document.body.appendChild(script)
      })
      const deliver = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      scope.postMessage = deliver
      scope.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      this.ready = load(base)
    }

    postMessage(data) {
      const scope = this.frame.contentWindow
      this.ready.then(() => scope.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
