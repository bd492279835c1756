#include "decode/save_prompt.h"

#include <algorithm>
#include <memory>

#include "cache/arena.h"
#include "decode/pass.h"
#include "decode/pass_plan.h"

namespace dlm {

void save_prompt(const Denoiser& denoiser, Engine& engine, const PromptCacheFormat& format,
                 const std::vector<int32_t>& canvas, const std::string& path,
                 const std::function<void()>& before_pass) {
  const auto length = static_cast<int32_t>(canvas.size());
  const std::unique_ptr<Arena> arena = engine.open_arena(format.page_rows, {length, length}, 0);
  // The file contains the rows of all positions, so layers with a window keep them too.
  const Arena::Handle place = arena->take({{canvas, length, 0, length}}).front();
  // Several passes keep the arrays of a pass small.
  const int32_t most = std::max(kPassTokens / format.page_rows, 1) * format.page_rows;
  Buffers buffers;
  for (int32_t first = 0; first < length; first += most) {
    const int32_t tokens = std::min(most, length - first);
    Pass pass = prepare_pass(denoiser, {{&canvas, {first, first + tokens}}}, 1, buffers);
    buffers.score_rows.assign(1, 0);  // a pass must score at least one row
    prepare_scores(denoiser, pass, {}, buffers);
    before_pass();
    arena->run(pass, {{place, first, tokens, first, CacheUse::append}});
  }
  PromptCache::write(path, format, canvas,
                     [&](size_t number, std::byte* to) { arena->read_page(place, number, to); });
}

}  // namespace dlm
