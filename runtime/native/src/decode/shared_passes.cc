// A PassMaker that runs different requests in one pass. Each canvas is one segment of the pass. The
// arena, a memory area that all requests share, contains the cache rows of all canvases.
//
// Pieces, arena parts and segments are in the same order: member by member, and canvas by canvas.
// Member::kept says which cache rows a member reads. If Member::kept has changed since the last
// pass, the arena moves the member's rows before the pass. A member owns its places in the arena
// until the member is destroyed. So a request never sees the rows of another request.
#include <algorithm>

#include "cache/arena.h"
#include "decode/pass_maker.h"

namespace dlm {
namespace {

// The largest size of the logits in a pass of several requests, in bytes. If the logits would be
// larger, the requests take turns.
constexpr double kMostLogits = 256 << 20;

std::vector<int32_t> rows_by_canvas(const Request& request) {
  const size_t rows = request.has_cache() ? request.canvas().size() : 0;
  return std::vector<int32_t>(request.canvases(), static_cast<int32_t>(rows));
}

class SharingMember final : public Member {
 public:
  SharingMember(Request& request, Arena& arena) : Member(request), arena_(arena) {
    places.reserve(request.canvases());
  }
  ~SharingMember() override {
    for (const Arena::Handle place : places) arena_.give_back(place);
  }

  // The constructor does not reserve places in the arena. So if take_places() throws an error, the
  // destructor frees the places that were already reserved.
  void take_places() {
    for (const int32_t rows : rows_by_canvas(request)) places.push_back(arena_.take(rows));
  }

  std::vector<Arena::Handle> places;  // one per canvas

 private:
  Arena& arena_;
};

class SharedPasses final : public PassMaker {
 public:
  SharedPasses(const Denoiser& denoiser, std::unique_ptr<Arena> arena, int64_t rows)
      : PassMaker(rows), denoiser_(denoiser), arena_(std::move(arena)) {}

  bool has_room(const Request& request) const override {
    return arena_->has_room(rows_by_canvas(request));
  }

  std::unique_ptr<Member> start(Request& request) override {
    auto member = std::make_unique<SharingMember>(request, *arena_);
    member->take_places();
    return member;
  }

  std::vector<size_t> choose(const std::vector<Member*>& members,
                             const PassLimits& limits) override {
    std::vector<size_t> chosen;
    PassLoad load;
    bool has_logits = false;
    for (size_t number = 0; number < members.size(); ++number) {
      PassLoad more = load;
      more += members[number]->request.load();
      const bool wants_logits = has_logits || members[number]->needs.logits;
      const double logits = wants_logits ? more.rows * denoiser_.vocab_size * sizeof(float) : 0;
      const bool is_long = more.tokens > limits.most_tokens ||
                           (limits.most_ms > 0 && limits.cost.of(more) > limits.most_ms);
      if (!chosen.empty() && (is_long || logits > kMostLogits)) continue;
      chosen.push_back(number);
      load = more;
      has_logits = wants_logits;
    }
    return chosen;
  }

  dlm_pass run(const std::vector<Member*>& members, Buffers& buffers,
               PassSeconds& seconds) override {
    buffers.score_rows.clear();
    std::vector<Piece> pieces;
    std::vector<Arena::Part> parts;
    int64_t first = 0;  // first row of the canvas among all rows of the pass
    for (Member* const each : members) {
      auto& member = static_cast<SharingMember&>(*each);
      const Request& request = member.request;
      const Stage& stage = request.stage();
      member.first_row = buffers.score_rows.size();
      member.apart = request.positions().size();
      for (size_t number = 0; number < request.canvases(); ++number) {
        pieces.push_back({&request.canvas(number), stage.rows});
        for (const int32_t position : request.positions())
          buffers.score_rows.push_back(first + std::max(position - denoiser_.shift, 0) -
                                       stage.rows.first);
        parts.push_back({member.places[number], stage.rows.first, stage.rows.tokens(), stage.cached,
                         stage.use});
        first += stage.rows.tokens();
      }
      if (stage.cached == 0 || member.kept == stage.rows) continue;
      const Stopwatch timer(seconds.cache);
      for (const Arena::Handle place : member.places)
        arena_->keep_outside(place, stage.rows.first, stage.rows.last);
      member.kept = stage.rows;
    }
    // A pass scores at least one row, even if no request reads this row.
    if (buffers.score_rows.empty()) buffers.score_rows.push_back(0);
    dlm_pass pass = prepare_pass(pieces, 1, buffers);
    prepare_scores(denoiser_, pass, needs_of(members), buffers);
    {
      const Stopwatch timer(seconds.engine);
      arena_->run(pass, parts);
    }
    for (Member* const each : members) {
      auto& member = static_cast<SharingMember&>(*each);
      if (keeps_rows(member.request.stage().use)) member.kept = {0, 0};
      member.cache_bytes = 0;
      for (const Arena::Handle place : member.places) member.cache_bytes += arena_->bytes_of(place);
    }
    return pass;
  }

  uint64_t cache_bytes() const override { return arena_->cache_bytes(); }

 private:
  const Denoiser& denoiser_;
  const std::unique_ptr<Arena> arena_;
};

}  // namespace

std::unique_ptr<PassMaker> make_shared_passes(const Denoiser& denoiser, Engine& engine,
                                              int64_t rows) {
  std::unique_ptr<Arena> arena = engine.open_arena(rows);
  if (arena == nullptr) return nullptr;
  return std::make_unique<SharedPasses>(denoiser, std::move(arena), rows);
}

}  // namespace dlm
