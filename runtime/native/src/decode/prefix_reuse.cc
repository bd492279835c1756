#include "decode/prefix_reuse.h"

#include <algorithm>

namespace dlm {

std::vector<Arena::Wanted> PrefixReuse::wanted_by(const Request& request) const {
  const int32_t rows = request.has_cache() ? request.longest() : 0;
  int32_t stored = request.reusable();
  // In layers with a window, a shorter part of a prompt may lack rows that a longer part does not
  // need. So if a canvas lowers `stored`, ask the other canvases again.
  for (int32_t before = -1; before != stored;) {
    before = stored;
    for (size_t number = 0; number < request.canvases(); ++number) {
      const std::vector<int32_t>& tokens = request.canvas(number);
      stored = std::max(arena_.stored(tokens, request.prefix_group(), stored),
                        files_.find(tokens, stored, page_rows_).rows);
    }
  }
  std::vector<Arena::Wanted> wanted;
  for (size_t number = 0; number < request.canvases(); ++number)
    wanted.push_back(
        {request.canvas(number), rows, stored, request.kept_in_window(), request.prefix_group()});
  return wanted;
}

void PrefixReuse::adopt(const Request& request, const std::vector<Arena::Handle>& places,
                        int32_t stored) {
  for (size_t number = 0; number < places.size(); ++number) {
    const std::vector<int32_t>& tokens = request.canvas(number);
    arena_.adopt(places[number], tokens, stored, files_.find(tokens, stored, page_rows_));
  }
}

bool PrefixReuse::fill_alike(const Request& mine, const Request& theirs, int32_t exact) const {
  if (!arena_.shares() || !mine.is_filling() || !theirs.is_filling()) return false;
  const int32_t from = mine.stage().rows.first, end = from + page_rows_;
  if (mine.prefix_group() != theirs.prefix_group() || from != theirs.stage().rows.first ||
      end > std::min(mine.reusable(), theirs.reusable()) || exact < from ||
      mine.canvases() > theirs.canvases())
    return false;
  for (size_t number = 0; number < mine.canvases(); ++number)
    if (!std::equal(mine.canvas(number).begin(), mine.canvas(number).begin() + end,
                    theirs.canvas(number).begin()))
      return false;
  return true;
}

int32_t Request::reusable() const {
  if (!has_cache() || done()) return 0;
  if (!denoiser_.splits_prompts())
    // Only the first pass computes the cache rows before the returned position.
    return policy_.reuse_prompt != 0 ? std::max(0, plan_.front().block.first - policy_.refresh) : 0;
  // A shifted denoiser predicts the first position of a block in the row just before the block. So
  // a pass of this request must compute this row.
  return std::max(0, plan_.front().block.first - causal_shift(policy_, denoiser_));
}

void Request::skip_stored(int32_t rows) {
  const auto next = plan_.begin() + static_cast<std::ptrdiff_t>(stage_);
  for (auto it = next; it != plan_.end() && it->rows.first < rows; ++it) {
    it->rows.first = it->cached = std::min(rows, it->rows.last);
    if (it->use == CacheUse::write) it->use = CacheUse::refresh;
  }
  const auto first =
      std::find_if(next, plan_.end(), [](const Stage& stage) { return stage.rows.tokens() > 0; });
  skipped_ += static_cast<int32_t>(first - next);
  plan_.erase(next, first);
  step_ = 0;
  masked_ = count_undecided(stage().decided);
  settle();
}

int32_t Request::exact_after(int32_t exact) const {
  const Stage& now = stage();
  if (!denoiser_.splits_prompts()) return keeps_rows(now.use) ? reusable() : exact;
  // A later pass stores drafted rows again.
  const int32_t last = now.is_draft ? now.rows.first + now.causal_rows : now.rows.last;
  if (now.use != CacheUse::append || now.rows.first > exact) return exact;
  return std::max(exact, std::min(last, now.block.first));
}

}  // namespace dlm
