// A PassMaker for engines that accept only one shape per pass. Requests of the same shape run in
// lockstep, which means that they share every pass. Requests of different shapes take turns.
//
// A lane is an engine context together with the requests that use the context. With a cache, all
// requests of a lane must be at the same stage of their plans. A request that finishes a stage
// early waits for the slowest request. While a request waits, passes still compute the rows of this
// request, but the runtime ignores the results. A request that has ended leaves the lane before the
// next pass that reads no cache. (With cache `block`, only passes of the first block read no
// cache.) Without a cache, the requests of a lane may be at different stages.
//
// Invariants:
//   - A lane has a context as long as the lane has a member. When the last member leaves, the
//     context moves to spare_.
//   - No request joins a lane after the lane's first pass, because the lane's cache has no rows for
//     the request.
//   - Lane::rows assigns the rows of the last pass's batch to members. This assignment does not
//     change while passes read the cache. If a member has left, the batch rows of this member run
//     the tokens of a different member, and the results are ignored.
//   - leave() must not throw, because a destructor calls it. So start() reserves the memory that
//     leave() needs.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "decode/pass_maker.h"

namespace dlm {

class LockstepPasses final : public PassMaker {
 public:
  // `rows` is the largest number of cache rows of all requests together. `lanes` is the largest
  // number of lanes. `denoiser` and `engine` must outlive this object.
  LockstepPasses(const Denoiser& denoiser, Engine& engine, int64_t rows, size_t lanes);
  ~LockstepPasses() override;

  // Sets the largest number of requests of one shape that may share a lane (default 1). Requests
  // can join a lane only before the lane's first pass.
  void set_together(size_t requests) { together_ = requests; }

  // A context that no request uses, for passes that do not belong to a request.
  Context& spare_context();

  bool has_room(const Request& request) const override;
  std::unique_ptr<Member> start(Request& request, const PassLimits& limits) override;
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
  std::vector<std::unique_ptr<Context>> spare_;  // the contexts that no lane uses
};

}  // namespace dlm
