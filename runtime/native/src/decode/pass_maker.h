// A PassMaker combines running requests into passes, and owns their cached keys and values. The
// Runner decides when a pass is made and calls the PassMaker.
//
// There are two implementations. For engines that take segments, make_shared_passes runs any mix of
// requests in one pass. For engines that take one shape per pass, LockstepPasses runs only requests
// of the same shape together (decode/lockstep_passes.h).
//
// For each request, the runner calls has_room, then start, which creates the request's Member. Then
// it calls choose and run any number of times. At the end it destroys the Member. All calls come
// from the runner's thread. A Member refers to its Request and its PassMaker. Both must outlive the
// Member, and the Request must not move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode/cost.h"
#include "decode/pass.h"
#include "decode/request.h"

namespace dlm {

// A running request and the cache rows reserved for it. Destroying the Member frees these rows.
class Member {
 public:
  explicit Member(Request& request) : request(request) {}
  virtual ~Member() = default;
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Request& request;
  Needs needs;  // outputs that the next pass must return; the runner sets them before the pass
  size_t first_row = 0, apart = 0;  // where its outputs are in the last pass; see predictions_of
  uint64_t cache_bytes = 0;         // current size of its keys and values
  // If not empty: the cache holds the rows outside this range, and no row was stored since. If
  // empty: the next pass that reads the cache must first set the range.
  Range kept{0, 0};
};

// Limits of a pass that several requests share.
struct PassLimits {
  int32_t most_tokens;
  double most_ms;  // 0: no limit
  PassCost cost;   // predicts the time of a pass
};

// The seconds of a pass, split by where they were spent.
struct PassSeconds {
  double engine = 0, cache = 0;
};

class PassMaker {
 public:
  explicit PassMaker(int64_t rows) : rows_(rows) {}
  virtual ~PassMaker() = default;

  // The most key/value rows that all running requests may hold together.
  int64_t rows() const { return rows_; }

  virtual bool has_room(const Request& request) const = 0;

  // Starts a request. Call it only if has_room() returned true.
  virtual std::unique_ptr<Member> start(Request& request) = 0;

  // Chooses the members of the next pass, at least one, and returns their indices in `members`.
  // `members` lists all running members. The member that has waited longest comes first.
  virtual std::vector<size_t> choose(const std::vector<Member*>& members,
                                     const PassLimits& limits) = 0;

  // Runs one pass for the chosen members. Throws the engine's errors.
  virtual dlm_pass run(const std::vector<Member*>& members, Buffers& buffers,
                       PassSeconds& seconds) = 0;

  // The bytes of keys and values that all running requests use now.
  virtual uint64_t cache_bytes() const = 0;

 private:
  const int64_t rows_;
};

// The number of key/value rows that a request needs, over all its canvases.
inline int64_t rows_of(const Request& request) {
  return request.has_cache() ? static_cast<int64_t>(request.canvases() * request.canvas().size())
                             : 0;
}

// The outputs besides candidates that at least one of the members needs.
inline Needs needs_of(const std::vector<Member*>& members) {
  Needs needs;
  for (const Member* const member : members) {
    needs.entropy |= member->needs.entropy;
    needs.logits |= member->needs.logits;
  }
  return needs;
}

// Returns NULL if the engine takes no segments. `rows` is the number of key/value rows for all
// requests together. denoiser and engine must outlive the result.
std::unique_ptr<PassMaker> make_shared_passes(const Denoiser& denoiser, Engine& engine,
                                              int64_t rows);

}  // namespace dlm
