// Makes the passes of running requests, one layer below the runner. It owns their keys and values.
//
// Engines that take segments run any mix of requests in one pass (make_shared_passes). Engines that
// take one shape per pass run requests of the same shape together (decode/lockstep_passes.h).
//
// Order of calls for a request: has_room; start, which creates its Member; any number of rounds of
// choose and run; then the Member is destroyed. All calls come from the runner's thread. A Member
// refers to its Request and its PassMaker: both must outlive it, and the request must not move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode/cost.h"
#include "decode/pass.h"
#include "decode/request.h"

namespace dlm {

// A running request and its space in the cache. Destroying it frees that space.
class Member {
 public:
  explicit Member(Request& request) : request(request) {}
  virtual ~Member() = default;
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Request& request;
  Needs needs;                      // for the next pass; set when the runner knows its positions
  size_t first_row = 0, apart = 0;  // for the last pass; see predictions_of
  uint64_t cache_bytes = 0;         // current size of its keys and values
  // The cache keeps the rows outside this range, and no row was stored since that was set. Empty
  // otherwise; then the next pass that reads the cache must set it.
  Range kept{0, 0};
};

// Limits of a pass that several requests share.
struct PassLimits {
  int32_t most_tokens;
  double most_ms;  // 0: no limit
  PassCost cost;   // predicts the time of a pass
};

// The seconds of a pass, by where they were spent.
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

  // Only if has_room().
  virtual std::unique_ptr<Member> start(Request& request) = 0;

  // Returns the indices of at least one member for the next pass. members: all, longest wait first.
  virtual std::vector<size_t> choose(const std::vector<Member*>& members,
                                     const PassLimits& limits) = 0;

  // Makes the pass of the chosen members. Throws the engine's errors.
  virtual dlm_pass run(const std::vector<Member*>& members, Buffers& buffers,
                       PassSeconds& seconds) = 0;

  // The current bytes of all running requests.
  virtual uint64_t cache_bytes() const = 0;

 private:
  const int64_t rows_;
};

// The key/value rows that a request holds, over all its canvases.
inline int64_t rows_of(const Request& request) {
  return request.has_cache() ? static_cast<int64_t>(request.canvases() * request.canvas().size())
                             : 0;
}

// The outputs that the requests need besides candidates.
inline Needs needs_of(const std::vector<Member*>& members) {
  Needs needs;
  for (const Member* const member : members) {
    needs.entropy |= member->needs.entropy;
    needs.logits |= member->needs.logits;
  }
  return needs;
}

// NULL if the engine takes no segments. rows: of keys and values. Both references must outlive it.
std::unique_ptr<PassMaker> make_shared_passes(const Denoiser& denoiser, Engine& engine,
                                              int64_t rows);

}  // namespace dlm
