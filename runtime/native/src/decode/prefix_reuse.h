// Which stored rows a pass reads instead of computing them: the rows of a prompt's first tokens.
//
// Requests whose tokens are equal from the start share the pages of the arena that store the rows
// of these tokens. Requests never share the rows of different tokens. If no request has computed
// the rows of a prompt, they can come from a prompt cache that contains the same tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/arena.h"
#include "cache/prompt_cache.h"
#include "decode/request.h"

namespace dlm {

class PrefixReuse {
 public:
  PrefixReuse(Arena& arena, const PromptCaches& files, int32_t page_rows)
      : arena_(arena), files_(files), page_rows_(page_rows) {}

  // Lists the canvases of a request. For each canvas, the result says how many leading tokens have
  // stored rows. All canvases of a request run the same passes, so this number is the same for all
  // of them.
  std::vector<Arena::Wanted> wanted_by(const Request& request) const;

  // Gives the canvases of a request the rows of their first `stored` tokens. `places` are the
  // places of the canvases in the arena.
  void adopt(const Request& request, const std::vector<Arena::Handle>& places, int32_t stored);

  // Returns true if both requests would compute the rows of the same page next, because their
  // tokens are equal. Then `mine` can wait until `theirs` has stored the page. `exact` is the
  // number of leading positions of `theirs` whose rows are final.
  bool fill_alike(const Request& mine, const Request& theirs, int32_t exact) const;

 private:
  Arena& arena_;
  const PromptCaches& files_;
  const int32_t page_rows_;
};

}  // namespace dlm
