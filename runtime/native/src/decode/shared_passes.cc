// A PassMaker that can run different requests in one pass. Each canvas is one segment of the pass.
// All requests share one memory area, the arena, which stores the cache rows of all canvases.
//
// The lists of canvases, of places in the arena and of segments have the same order: by member,
// then by canvas. A member owns its places in the arena until the member is destroyed.
// decode/prefix_reuse.h finds the stored rows that a member need not compute.
#include <algorithm>

#include "cache/arena.h"
#include "decode/pass_maker.h"
#include "decode/prefix_reuse.h"

namespace dlm {
namespace {

// The largest size of the logits of a shared pass, in bytes, on the host or on the device. If the
// logits would be larger, the requests take turns.
constexpr double kMostLogits = 256 << 20;

class SharingMember final : public Member {
 public:
  // The arena must have room for the canvases. The rows of the first tokens of each canvas may
  // already be stored.
  SharingMember(Request& request, Arena& arena, const std::vector<Arena::Wanted>& wanted)
      : Member(request), places(arena.take(wanted)), exact(wanted.front().stored), arena_(arena) {
    reused = exact;
  }
  ~SharingMember() override {
    for (const Arena::Handle place : places) arena_.give_back(place);
  }

  const std::vector<Arena::Handle> places;  // one place per canvas
  int32_t exact;                            // a position, see Request::exact_after

 private:
  Arena& arena_;
};

class SharedPasses final : public PassMaker {
 public:
  SharedPasses(const Denoiser& denoiser, std::unique_ptr<Arena> arena, RowCounts rows,
               int32_t most_tokens, const PromptCaches& files)
      : PassMaker(rows, dlm::page_rows(denoiser.visible_block), most_tokens),
        denoiser_(denoiser),
        arena_(std::move(arena)),
        prefix_(*arena_, files, page_rows()) {}

  bool has_room(const Request& request) const override {
    return arena_->has_room(prefix_.wanted_by(request));
  }

  std::unique_ptr<Member> start(Request& request, const PassLimits& limits) override {
    auto member = std::make_unique<SharingMember>(request, *arena_, prefix_.wanted_by(request));
    prefix_.adopt(request, member->places, member->exact);
    if (member->reused > 0) request.skip_stored(member->reused);
    request.split_prefill(limits.most_tokens, limits.most_ms, limits.cost);
    return member;
  }

  void reuse(Member& which) override {
    auto& member = static_cast<SharingMember&>(which);
    Request& request = member.request;
    if (!request.is_filling() || member.exact < request.stage().rows.first) return;
    const int32_t stored = prefix_.wanted_by(request).front().stored;
    if (stored <= request.stage().rows.first) return;
    prefix_.adopt(request, member.places, stored);
    member.reused += stored - request.stage().rows.first;
    member.exact = stored;
    request.skip_stored(stored);
  }

  std::vector<size_t> choose(const std::vector<Member*>& members,
                             const PassLimits& limits) override {
    std::vector<size_t> chosen;
    PassLoad load;
    bool has_logits = false;
    for (size_t number = 0; number < members.size(); ++number) {
      PassLoad more = load;
      more += members[number]->request.load();
      const bool wants_logits = has_logits || members[number]->needs.computes_logits();
      const double logits = wants_logits ? more.rows * denoiser_.vocab_size * sizeof(float) : 0;
      const bool is_long = more.tokens > limits.most_tokens ||
                           (limits.most_ms > 0 && limits.cost.of(more) > limits.most_ms);
      if (!chosen.empty() && (is_long || logits > kMostLogits)) continue;
      const auto fills_alike = [&](size_t other) {
        const auto& chosen_one = static_cast<const SharingMember&>(*members[other]);
        return prefix_.fill_alike(members[number]->request, chosen_one.request, chosen_one.exact);
      };
      if (std::any_of(chosen.begin(), chosen.end(), fills_alike)) continue;
      chosen.push_back(number);
      load = more;
      has_logits = wants_logits;
    }
    return chosen;
  }

  Pass run(const std::vector<Member*>& members, Buffers& buffers, PassSeconds& seconds) override {
    buffers.score_rows.clear();
    std::vector<Piece> pieces;
    std::vector<Arena::Part> parts;
    int64_t first = 0;  // index of the canvas's first row among all rows of the pass
    for (Member* const each : members) {
      auto& member = static_cast<SharingMember&>(*each);
      const Request& request = member.request;
      const Stage& stage = request.stage();
      member.first_row = buffers.score_rows.size();
      member.apart = request.positions().size();
      for (size_t number = 0; number < request.canvases(); ++number) {
        pieces.push_back({&request.canvas(number), stage.rows, stage.draft_rows(), stage.is_updated,
                          &request.conditioning(), request.first_block()});
        for (const int32_t position : request.positions())
          buffers.score_rows.push_back(first + request.row_of(position));
        parts.push_back({member.places[number], stage.rows.first, stage.rows.tokens(), stage.cached,
                         stage.use});
        first += stage.rows.tokens();
      }
    }
    // A pass scores at least one row, even if no request reads this row.
    if (buffers.score_rows.empty()) buffers.score_rows.push_back(0);
    Pass pass = prepare_pass(denoiser_, pieces, 1, buffers);
    prepare_scores(denoiser_, pass, needs_of(members), buffers);
    set_temperatures(members, buffers);
    set_draws(members, pass);
    {
      const Stopwatch timer(seconds.engine);
      arena_->run(pass, parts);
    }
    for (Member* const each : members) {
      auto& member = static_cast<SharingMember&>(*each);
      member.exact = member.request.exact_after(member.exact);
      member.cache_bytes = 0;
      const Stopwatch timer(seconds.cache);
      for (size_t number = 0; number < member.places.size(); ++number) {
        const Arena::Handle place = member.places[number];
        arena_->share(place, member.request.canvas(number), member.exact);
        member.cache_bytes += arena_->bytes_of(place);
      }
    }
    return pass;
  }

  uint64_t cache_bytes() const override { return arena_->cache_bytes(); }
  uint64_t prefix_bytes() const override { return arena_->shared_bytes(); }

 private:
  const Denoiser& denoiser_;
  const std::unique_ptr<Arena> arena_;
  PrefixReuse prefix_;
};

}  // namespace

std::unique_ptr<PassMaker> make_shared_passes(const Denoiser& denoiser, Engine& engine,
                                              RowCounts rows, int64_t most_idle,
                                              const PromptCaches& files) {
  std::unique_ptr<Arena> arena =
      engine.open_arena(page_rows(denoiser.visible_block), rows, most_idle);
  if (arena == nullptr) return nullptr;
  const int32_t most_tokens = engine.most_shared_tokens(denoiser.max_canvas_length);
  return std::make_unique<SharedPasses>(denoiser, std::move(arena), rows, most_tokens, files);
}

}  // namespace dlm
