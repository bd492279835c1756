#include "decode/lockstep_passes.h"

#include <algorithm>

namespace dlm {

class LockstepPasses::LaneMember final : public Member {
 public:
  LaneMember(Request& request, LockstepPasses& passes, std::list<Lane>::iterator lane)
      : Member(request), lane(lane), passes_(passes) {}
  ~LaneMember() override { passes_.leave(*this); }

  const std::list<Lane>::iterator lane;

 private:
  LockstepPasses& passes_;
};

struct LockstepPasses::Lane {
  // One row of the batch. In a pass, each row of the batch computes one canvas of one member.
  struct Row {
    LaneMember* member;  // NULL if the member has left the lane
    size_t canvas;
  };

  std::unique_ptr<Context> context;
  std::vector<LaneMember*> members;
  std::vector<Row> rows;  // the canvas that each row of the batch computed in the last pass
  bool has_begun = false;
  // The range that was passed to the last call of keep_outside. The context keeps the cache rows of
  // all positions outside this range. Passes that store rows set `kept` to an empty range. Then
  // keep_outside must be called before the next pass that reads the cache.
  Range kept{0, 0};

  const LaneMember& slowest() const {
    return **std::min_element(members.begin(), members.end(), [](const auto* a, const auto* b) {
      return a->request.stage_number() < b->request.stage_number();
    });
  }

  // Assigns one batch row to each canvas of each member of the lane. Does nothing if the next pass
  // reads the cache, because each canvas must then stay in the row whose cache it has filled. In
  // this case, the rows of a member that has left the lane also stay in the batch.
  void lay_out_rows() {
    if (!rows.empty() && slowest().request.stage().cached > 0) return;
    rows.clear();
    for (LaneMember* const member : members)
      for (size_t canvas = 0; canvas < member->request.canvases(); ++canvas)
        rows.push_back({member, canvas});
  }
};

LockstepPasses::LockstepPasses(const Denoiser& denoiser, Engine& engine, RowCounts rows,
                               size_t lanes)
    : PassMaker(rows, 1), denoiser_(denoiser), engine_(engine), most_lanes_(lanes) {}

LockstepPasses::~LockstepPasses() = default;

Context& LockstepPasses::spare_context() {
  if (spare_.empty()) spare_.push_back(engine_.open_context(denoiser_.max_canvas_length));
  return *spare_.back();
}

// Finds a lane that the request can join. Returns lanes_.end() if no lane can take the request.
auto LockstepPasses::find_lane(const Request& request) const -> std::list<Lane>::const_iterator {
  return std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
    return !lane.has_begun && lane.members.size() < together_ &&
           lane.members.front()->request.fits(request);
  });
}

bool LockstepPasses::has_room(const Request& request) const {
  if (!(rows_taken_ + rows_of(request, page_rows())).fits(rows())) return false;
  return lanes_.size() < most_lanes_ || find_lane(request) != lanes_.end();
}

std::unique_ptr<Member> LockstepPasses::start(Request& request, const PassLimits&) {
  const auto found = find_lane(request);
  // This call erases nothing. It only converts the const_iterator to an iterator.
  auto lane = lanes_.erase(found, found);
  std::list<Lane> made;
  if (lane == lanes_.end()) {
    spare_context();
    spare_.reserve(spare_.size() + lanes_.size() + 1);  // leave() must not allocate
    lane = made.emplace(made.end());
  }
  lane->members.reserve(lane->members.size() + 1);
  // The member's destructor subtracts the request's cache rows from rows_taken_. So rows_taken_
  // must include them whenever the member is destroyed.
  auto member = std::make_unique<LaneMember>(request, *this, lane);
  if (!made.empty()) {
    lane->context = std::move(spare_.back());
    spare_.pop_back();
    lanes_.splice(lanes_.end(), made);
  }
  lane->members.push_back(member.get());
  rows_taken_ = rows_taken_ + rows_of(request, page_rows());
  return member;
}

void LockstepPasses::leave(LaneMember& member) noexcept {
  Lane& lane = *member.lane;
  rows_taken_ = rows_taken_ - rows_of(member.request, page_rows());
  lane.members.erase(std::find(lane.members.begin(), lane.members.end(), &member));
  for (Lane::Row& row : lane.rows)
    if (row.member == &member) row.member = nullptr;
  if (!lane.members.empty()) return;
  spare_.push_back(std::move(lane.context));
  lanes_.erase(member.lane);
}

std::vector<size_t> LockstepPasses::choose(const std::vector<Member*>& members, const PassLimits&) {
  const auto lane = static_cast<const LaneMember*>(members.front())->lane;
  const Request& slowest = lane->slowest().request;
  std::vector<size_t> chosen;
  for (size_t number = 0; number < members.size(); ++number) {
    const auto& member = static_cast<const LaneMember&>(*members[number]);
    const bool waits =
        member.request.canvas().size() != slowest.canvas().size() ||
        (slowest.has_cache() && member.request.stage_number() != slowest.stage_number());
    if (member.lane == lane && !waits) chosen.push_back(number);
  }
  return chosen;
}

Pass LockstepPasses::run(const std::vector<Member*>& members, Buffers& buffers,
                         PassSeconds& seconds) {
  Lane& lane = *static_cast<const LaneMember*>(members.front())->lane;
  lane.has_begun = true;
  lane.lay_out_rows();
  const Stage stage = members.front()->request.stage();
  const Range rows = stage.rows;
  std::vector<Piece> pieces;
  for (const Lane::Row& row : lane.rows) {
    const Request& request = row.member == nullptr ? members.front()->request : row.member->request;
    const size_t canvas = row.member == nullptr ? 0 : row.canvas;
    pieces.push_back({&request.canvas(canvas), rows, stage.draft_rows(), stage.is_updated,
                      &request.conditioning(), request.first_block()});
  }
  Pass pass = prepare_pass(denoiser_, pieces, static_cast<int32_t>(pieces.size()), buffers);
  pass.cached = stage.cached;
  size_t most = 1;  // a pass must score at least one row, even if no request needs this row
  for (const Member* const member : members)
    most = std::max(most, member->request.positions().size());
  // All canvases of a pass must score the same number of rows. A canvas with fewer positions to
  // score also scores row 0, which always exists.
  buffers.score_rows.assign(lane.rows.size() * most, 0);
  for (size_t row = 0; row < lane.rows.size(); ++row) {
    LaneMember* const member = lane.rows[row].member;
    if (std::find(members.begin(), members.end(), member) == members.end()) continue;
    if (lane.rows[row].canvas == 0) member->first_row = row * most, member->apart = most;
    int64_t* to = buffers.score_rows.data() + row * most;
    for (const int32_t position : member->request.positions())
      *to++ = member->request.row_of(position);
  }
  prepare_scores(denoiser_, pass, needs_of(members), buffers);
  set_temperatures(members, buffers);
  set_draws(members, pass);
  // A pass that appends its rows reads only the rows before them.
  const Range left_out{rows.first,
                       stage.use == CacheUse::append ? denoiser_.max_canvas_length : rows.last};
  if (pass.cached > 0 && !(lane.kept == left_out)) {
    const Stopwatch timer(seconds.cache);
    lane.context->keep_outside(left_out.first, left_out.last);
    lane.kept = left_out;
  }
  {
    const Stopwatch timer(seconds.engine);
    lane.context->run(pass, stage.use, members.front()->request.has_conditioning());
  }
  if (keeps_rows(stage.use)) lane.kept = {0, 0};
  // Before a request has stored its first cache row, the context may still contain cache rows of an
  // earlier request. The loop must not count these rows.
  for (Member* const member : members)
    if (keeps_rows(stage.use) || member->cache_bytes > 0)
      member->cache_bytes =
          lane.context->cache_bytes() / lane.rows.size() * member->request.canvases();
  return pass;
}

uint64_t LockstepPasses::cache_bytes() const {
  uint64_t bytes = 0;
  for (const Lane& lane : lanes_)
    for (const LaneMember* const member : lane.members) bytes += member->cache_bytes;
  return bytes;
}

}  // namespace dlm
