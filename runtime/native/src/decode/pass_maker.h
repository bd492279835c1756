// A PassMaker makes passes for the running requests, and owns their cached keys and values. The
// Runner decides when to make a pass, and calls the PassMaker.
//
// There are two implementations:
//   - make_shared_passes makes a PassMaker that runs any mix of requests in one pass. The engine
//     must accept segments: parts of a pass that belong to different canvases.
//   - LockstepPasses is for all other engines. Only requests of the same shape run in the same pass
//     (decode/lockstep_passes.h).
//
// For each request, the runner first calls has_room, and then start, which creates the request's
// Member. For each pass, the runner calls choose and run. When the request has ended, the runner
// destroys the Member. All calls come from the runner's thread. A Member refers to its Request and
// its PassMaker. The Request and the PassMaker must outlive the Member, and the Request must not
// move in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/arena.h"
#include "cache/prompt_cache.h"
#include "decode/cost.h"
#include "decode/pass.h"
#include "decode/request.h"

namespace dlm {

// A running request, together with the cache rows that are reserved for this request. Destroying
// the Member frees these rows.
class Member {
 public:
  explicit Member(Request& request) : request(request) {}
  virtual ~Member() = default;
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Request& request;
  Needs needs;  // the outputs that the next pass must return; the runner sets this before the pass
  // The last pass returned the outputs of several requests. first_row and apart say where this
  // request's outputs are; see predictions_of.
  size_t first_row = 0, apart = 0;
  uint64_t cache_bytes = 0;  // bytes of keys and values that the request uses now
  // Number of positions at the start of the canvas whose cache rows were reused, so that no pass of
  // this request computed them.
  int32_t reused = 0;
};

// Limits for a pass that several requests share.
struct PassLimits {
  int32_t most_tokens;
  double most_ms;  // 0: no limit
  PassCost cost;   // predicts the time of a pass
};

// The seconds that a pass spent in the engine and on the cache.
struct PassSeconds {
  double engine = 0, cache = 0;
};

class PassMaker {
 public:
  // Each canvas reserves a multiple of `page_rows` cache rows. All requests together may reserve
  // `rows` cache rows. A pass that several requests share has at most `most_tokens` tokens.
  PassMaker(RowCounts rows, int32_t page_rows, int32_t most_tokens = INT32_MAX)
      : rows_(rows), page_rows_(page_rows), most_tokens_(most_tokens) {}
  virtual ~PassMaker() = default;

  // The largest number of cache rows that all running requests may use together. A cache row is the
  // keys and values of one position.
  RowCounts rows() const { return rows_; }
  int32_t page_rows() const { return page_rows_; }
  int32_t most_tokens() const { return most_tokens_; }

  virtual bool has_room(const Request& request) const = 0;

  // Starts a request. Call start() only if has_room() returned true.
  virtual std::unique_ptr<Member> start(Request& request, const PassLimits& limits) = 0;

  // Gives a member the cache rows that other requests have stored since the last pass, if the
  // member can use them. Adds the number of these rows to member.reused.
  virtual void reuse(Member& /*member*/) {}

  // Chooses the members of the next pass. `members` lists all running members, and the member that
  // has waited longest comes first. Returns at least one index into `members`.
  virtual std::vector<size_t> choose(const std::vector<Member*>& members,
                                     const PassLimits& limits) = 0;

  // Runs one pass for the chosen members. Throws the errors of the engine.
  virtual Pass run(const std::vector<Member*>& members, Buffers& buffers, PassSeconds& seconds) = 0;

  // Returns the number of bytes of keys and values that all running requests currently use.
  virtual uint64_t cache_bytes() const = 0;

  // Returns the number of bytes of stored keys and values that new requests can reuse.
  virtual uint64_t prefix_bytes() const { return 0; }

 private:
  const RowCounts rows_;
  const int32_t page_rows_, most_tokens_;
};

// Returns the number of cache rows that all canvases of a request need. Each canvas reserves a
// multiple of `page_rows` rows.
inline RowCounts rows_of(const Request& request, int32_t page_rows) {
  if (!request.has_cache()) return {};
  const auto canvases = static_cast<int64_t>(request.canvases());
  const int64_t length = request.longest();
  return {canvases * in_pages(length, page_rows),
          canvases * window_rows(length, request.kept_in_window(), page_rows)};
}

// Returns the outputs that at least one of the members needs. The candidates are not included,
// because every pass returns the candidates. If a member needs the logits, they are copied to the
// host, and all members draw there.
inline Needs needs_of(const std::vector<Member*>& members) {
  Needs needs;
  for (const Member* const member : members) {
    needs.entropy |= member->needs.entropy;
    needs.logits |= member->needs.logits;
    needs.conditioning |= member->needs.conditioning;
    needs.draws |= member->needs.draws;
  }
  if (needs.draws && needs.logits) needs.draws = false;
  return needs;
}

// Sets the temperature of each row that a member scores, if the denoiser has self-conditioning.
// Call this function after prepare_scores.
inline void set_temperatures(const std::vector<Member*>& members, Buffers& buffers) {
  if (buffers.temperature.empty()) return;
  for (const Member* const member : members)
    std::fill_n(buffers.temperature.begin() + static_cast<std::ptrdiff_t>(member->first_row),
                member->request.positions().size(), member->request.graph_temperature());
}

// Sets what the engine must draw from the rows of each member, if it draws. Call this function
// after prepare_scores.
inline void set_draws(const std::vector<Member*>& members, Pass& pass) {
  if (pass.draws == nullptr) return;
  for (const Member* const member : members)
    member->request.set_draws(pass.draws->rows, member->first_row, member->apart);
}

// Makes a PassMaker for an engine that accepts segments. Returns NULL if the engine does not accept
// segments. `rows` limits the number of cache rows of all requests together. Both numbers are
// multiples of page_rows(denoiser.visible_block). After the last request that uses a cache row has
// ended, the row can stay stored for new requests. At most `most_idle` rows stay stored in this
// way. The cache rows of a prompt can also come from one of the prompt caches in `files`.
// `denoiser`, `engine` and `files` must outlive the returned object.
std::unique_ptr<PassMaker> make_shared_passes(const Denoiser& denoiser, Engine& engine,
                                              RowCounts rows, int64_t most_idle,
                                              const PromptCaches& files);

}  // namespace dlm
