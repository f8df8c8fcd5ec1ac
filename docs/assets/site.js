// A table that is wider than the page scrolls, so the keyboard must reach it (WCAG 2.1, 2.1.1).
function makeTablesFocusable() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    box.tabIndex = 0
    box.setAttribute("role", "region")
    box.setAttribute("aria-label", "Table")
  }
}
new MutationObserver(makeTablesFocusable).observe(document.body, { childList: true, subtree: true })
makeTablesFocusable()
