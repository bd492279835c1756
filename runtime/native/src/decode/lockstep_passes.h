// A PassMaker for engines that accept only one shape per pass. Requests of the same shape run in
// lockstep, which means that they share every pass. Requests of different shapes take turns.
//
// A lane is an engine context together with the requests that use this context. With a cache, each
// pass runs the requests of a lane that are at the earliest stage of their plans (see plan.h). A
// request that finishes a stage early waits for the slowest request. Passes still compute the batch
// rows of a waiting request, but the results are ignored. The batch rows of a request that has
// ended also stay in the batch until the next pass that reads no cache. (With the cache `block`,
// only passes of the first block read no cached rows.) Without a cache, the requests of a lane may
// be at different stages, but a request whose canvas has grown waits for the others.
//
// Invariants:
//   - A lane owns a context as long as the lane has a member. When the last member leaves, the
//     context moves to spare_.
//   - No request joins a lane after the lane's first pass, because the lane's cache does not
//     contain the rows of that request.
//   - Lane::rows says which member each batch row of the last pass belongs to. The batch rows keep
//     their members while passes read the cache. If a member has left, its batch rows run the
//     tokens of a different member, and the results are ignored.
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
  // `rows` is the largest number of cache rows that all requests may use together. `lanes` is the
  // largest number of lanes. `denoiser` and `engine` must outlive this object.
  LockstepPasses(const Denoiser& denoiser, Engine& engine, RowCounts rows, size_t lanes);
  ~LockstepPasses() override;

  // Sets the largest number of requests of one shape that may share a lane (default 1). Requests
  // can join a lane only before the lane's first pass.
  void set_together(size_t requests) { together_ = requests; }

  // Returns a context that no request uses, for passes that do not belong to a request.
  Context& spare_context();

  bool has_room(const Request& request) const override;
  std::unique_ptr<Member> start(Request& request, const PassLimits& limits) override;
  std::vector<size_t> choose(const std::vector<Member*>& members,
                             const PassLimits& limits) override;
  Pass run(const std::vector<Member*>& members, Buffers& buffers, PassSeconds& seconds) override;
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
  RowCounts rows_taken_;
  std::list<Lane> lanes_;
  std::vector<std::unique_ptr<Context>> spare_;  // contexts of the engine that no lane uses
};

}  // namespace dlm
