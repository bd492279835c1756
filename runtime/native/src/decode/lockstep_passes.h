// The PassMaker for engines that accept only one shape per pass. Requests of the same shape run in
// lockstep, in one pass. Requests of different shapes take turns.
//
// A lane is an engine context and the requests that use it. With a cache, the requests of a lane go
// through the stages of their plans together. A request that finishes a stage early waits for the
// slowest one. Meanwhile, passes still compute the rows of the waiting request, but the results are
// ignored. A request that has ended leaves the lane before the next pass that reads no cache. (With
// cache `block`, only the first block has passes that read no cache.) Without a cache, the requests
// of a lane need not be at the same stage.
//
// Invariants:
//   - A lane has a context as long as it has a member. When the last member leaves, the context
//   moves
//     to spare_.
//   - No request joins a lane after the lane's first pass, because the cache lacks the request's
//   rows.
//   - Lane::rows maps the batch of the last pass to members. The order does not change while passes
//     read the cache. If a member has left, its rows of the batch run another member's tokens, and
//     the results are ignored.
//   - leave() must not throw, because a destructor calls it. So start() reserves the memory for it.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "decode/pass_maker.h"

namespace dlm {

class LockstepPasses final : public PassMaker {
 public:
  // `rows` and `lanes` are limits for all requests together. denoiser and engine must outlive this
  // object.
  LockstepPasses(const Denoiser& denoiser, Engine& engine, int64_t rows, size_t lanes);
  ~LockstepPasses() override;

  // Sets the most requests of one shape that may share a lane (default 1). Requests join a lane
  // before its first pass.
  void set_together(size_t requests) { together_ = requests; }

  // A context that no request uses, for passes that do not belong to a request.
  Context& spare_context();

  bool has_room(const Request& request) const override;
  std::unique_ptr<Member> start(Request& request) override;
  std::vector<size_t> choose(const std::vector<Member*>& members,
                             const PassLimits& limits) override;
  dlm_pass run(const std::vector<Member*>& members, Buffers& buffers,
               PassSeconds& seconds) override;
  uint64_t cache_bytes() const override;

 private:
  class LaneMember;
  struct Lane;

  std::list<Lane>::const_iterator find_lane(const Request& request) const;
  void leave(LaneMember& member) noexcept;

  const Denoiser& denoiser_;
  Engine& engine_;
  const size_t most_lanes_;
  size_t together_ = 1;
  int64_t rows_taken_ = 0;
  std::list<Lane> lanes_;
  std::vector<std::unique_ptr<Context>> spare_;  // contexts that no lane uses
};

}  // namespace dlm
