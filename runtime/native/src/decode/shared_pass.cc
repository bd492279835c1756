#include "decode/shared_pass.h"

#include <algorithm>

namespace dlm {
namespace {

constexpr double kMostLogits =
    256 << 20;  // bytes of one pass, where several requests could go one after the other

const std::vector<int32_t>& canvas(const Request& request, size_t number) {
  return number == 0 ? request.canvas() : request.unconditional();
}

}  // namespace

std::vector<int32_t> Member::rows_of(const Request& request) {
  return std::vector<int32_t>(
      request.canvases(), request.has_cache() ? static_cast<int32_t>(request.canvas().size()) : 0);
}

// The first constructor has ended when the second begins, so that what it takes is given back where
// it fails.
Member::Member(Request& request, Arena& arena, size_t places) : request_(request), arena_(arena) {
  places_.reserve(places);
}

Member::Member(Request& request, Arena& arena) : Member(request, arena, request.canvases()) {
  for (const int32_t rows : rows_of(request)) places_.push_back(arena.take(rows));
}

Member::~Member() {
  for (const Arena::Handle place : places_) arena_.give_back(place);
}

bool SharedPass::add(Member& member, const PassLimits& limits) {
  member.request_.find_positions();
  const Needs own = member.request_.needs();
  const Needs needs{needs_.entropy || own.entropy, needs_.logits || own.logits};
  PassLoad load = load_;
  load += member.request_.load();
  const double logits = needs.logits ? load.rows * denoiser_.vocab_size * sizeof(float) : 0;
  const bool is_long = load.tokens > limits.most_tokens ||
                       (limits.most_ms > 0 && limits.cost.of(load) > limits.most_ms);
  if (!members_.empty() && (is_long || logits > kMostLogits)) return false;
  members_.push_back(&member);
  load_ = load;
  needs_ = needs;
  return true;
}

void SharedPass::run(Buffers& buffers, dlm_stats& stats, dlm_pass_counts& counts,
                     const std::function<void(size_t number)>& on_error) {
  buffers.input_ids.clear(), buffers.position_ids.clear(), buffers.score_rows.clear();
  std::vector<Arena::Part> parts;
  for (Member* const member : members_) {
    const Request& request = member->request_;
    const Stage& stage = request.stage();
    for (size_t number = 0; number < request.canvases(); ++number) {
      const auto first = static_cast<int64_t>(buffers.input_ids.size());
      for (int32_t i = stage.rows.first; i < stage.rows.last; ++i) {
        buffers.input_ids.push_back(canvas(request, number)[static_cast<size_t>(i)]);
        buffers.position_ids.push_back(i);
      }
      for (const int32_t position : request.positions())
        buffers.score_rows.push_back(first + std::max(position - denoiser_.shift, 0) -
                                     stage.rows.first);
      parts.push_back({member->places_[number], stage.rows.first, stage.rows.tokens(), stage.cached,
                       stage.use});
    }
    if (stage.cached == 0 || member->kept_ == stage.rows) continue;
    const Stopwatch timer(stats.cache_s);
    for (const Arena::Handle place : member->places_)
      arena_.keep_outside(place, stage.rows.first, stage.rows.last);
    member->kept_ = stage.rows;
  }
  if (buffers.score_rows.empty())
    buffers.score_rows.push_back(0);  // a pass scores a row at least, whoever looks at it
  dlm_pass pass{};
  pass.batch = 1;
  pass.tokens = static_cast<int32_t>(buffers.input_ids.size());
  pass.input_ids = buffers.input_ids.data();
  pass.position_ids = buffers.position_ids.data();
  prepare_scores(denoiser_, pass, buffers);
  prepare_needs(denoiser_, pass, needs_, buffers);
  count(counts);
  ++stats.nfe;
  {
    const bool fills = std::any_of(members_.begin(), members_.end(), [](const Member* member) {
      return member->request_.stage().kind != PassKind::denoise;
    });
    const Stopwatch timer(fills ? stats.prefill_s : stats.passes_s);
    arena_.run(pass, parts);
  }
  stats.cache_bytes = arena_.cache_bytes();
  const Stopwatch timer(stats.selection_s);
  size_t row = 0;
  for (size_t number = 0; number < members_.size(); ++number) {
    Request& request = members_[number]->request_;
    if (keeps_rows(request.stage().use)) members_[number]->kept_ = {0, 0};
    const size_t rows = request.positions().size(), first = row;
    row += rows * request.canvases();
    try {
      with_name(request.name(), [&] {
        request.step(predictions_of(denoiser_, request, pass, first, rows, buffers), buffers);
      });
    } catch (...) {
      on_error(number);
    }
  }
}

// A pass counts as what any of its requests decides by it.
void SharedPass::count(dlm_pass_counts& counts) const {
  const auto has = [&](PassKind kind) {
    return std::any_of(members_.begin(), members_.end(),
                       [&](const Member* member) { return member->request_.stage().kind == kind; });
  };
  ++(has(PassKind::denoise) ? counts.denoise
     : has(PassKind::store) ? counts.store
                            : counts.prefill);
}

}  // namespace dlm
