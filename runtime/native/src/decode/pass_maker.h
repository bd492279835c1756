// What makes the passes of running requests, below the runner: it owns their keys and values.
//
// Engines that take segments run requests of all kinds in one pass (make_shared_passes). Engines
// that take one shape a pass run requests of the same shape together (decode/lockstep_passes.h).
//
// A request's way through it: has_room, start (which makes its Member), then any number of rounds
// of choose and run, until the Member is destroyed. All calls come from the runner's thread. A
// Member refers to its Request and its PassMaker: both outlive it, and the request does not move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode/cost.h"
#include "decode/pass.h"
#include "decode/request.h"

namespace dlm {

// A running request: its place among the keys and values, which it gives back when it is destroyed.
class Member {
 public:
  explicit Member(Request& request) : request(request) {}
  virtual ~Member() = default;
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Request& request;
  Needs needs;                      // of the next pass, once the runner has found its positions
  size_t first_row = 0, apart = 0;  // of the last pass: see predictions_of
  uint64_t cache_bytes = 0;         // of its keys and values now
  // The cache was told to keep the rows outside of these, and no row was stored since. Of no tokens
  // if that does not hold: the next pass that reads the cache has to tell it.
  Range kept{0, 0};
};

// What a pass that several requests share keeps within.
struct PassLimits {
  int32_t most_tokens;
  double most_ms;  // 0: any time
  PassCost cost;   // by which the time is expected
};

// Where the seconds of a pass went.
struct PassSeconds {
  double engine = 0, cache = 0;
};

class PassMaker {
 public:
  virtual ~PassMaker() = default;

  // How many rows of keys and values the requests that run may have together.
  virtual int64_t rows() const = 0;

  virtual bool has_room(const Request& request) const = 0;

  // There must be room.
  virtual std::unique_ptr<Member> start(Request& request) = 0;

  // Who takes part in the next pass, at least one. members: all that run, by time of waiting.
  virtual std::vector<size_t> choose(const std::vector<Member*>& members,
                                     const PassLimits& limits) = 0;

  // Makes the pass of those that were chosen. Throws what the engine throws.
  virtual dlm_pass run(const std::vector<Member*>& members, Buffers& buffers,
                       PassSeconds& seconds) = 0;

  // Of all that run, now.
  virtual uint64_t cache_bytes() const = 0;
};

// Rows of keys and values that a request keeps, of all its canvases.
inline int64_t rows_of(const Request& request) {
  return request.has_cache() ? static_cast<int64_t>(request.canvases() * request.canvas().size())
                             : 0;
}

// What the requests need of a pass beside candidates.
inline Needs needs_of(const std::vector<Member*>& members) {
  Needs needs;
  for (const Member* const member : members) {
    needs.entropy |= member->needs.entropy;
    needs.logits |= member->needs.logits;
  }
  return needs;
}

// NULL if the engine takes no segments. rows: of keys and values. Both references outlive it.
std::unique_ptr<PassMaker> make_shared_passes(const Denoiser& denoiser, Engine& engine,
                                              int64_t rows);

}  // namespace dlm
