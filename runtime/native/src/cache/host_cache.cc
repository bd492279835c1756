// The context of an engine that runs in host memory. Each context has its own keys and values in
// host memory.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/arena.h"
#include "cache/slots.h"
#include "engines/engine.h"

namespace dlm {
namespace {

// The keys and values of layers that have the same number of heads and the same window. Their rows
// are laid out and moved in the same way. A tensor contains the cached rows of all heads, and then
// the rows that the last pass computed.
class LayerGroup {
 public:
  LayerGroup(int32_t kv_heads, int32_t window, int32_t longest)
      : kv_heads_(kv_heads), window_(window), longest_(longest) {}

  bool suits(const CacheLayer& layer) const {
    return layer.kv_heads == kv_heads_ && layer.window == window_;
  }
  void add(size_t number, const CacheLayer& layer) {
    for (const size_t tensor : {2 * number, 2 * number + 1})
      tensors_.push_back({tensor, layer.row_bytes(), 0});
    sum_ += 2 * layer.row_bytes();
  }

  // Returns how many rows of each head a pass reads that reads `cached` positions.
  int32_t rows_of(int32_t cached) const { return window_ > 0 ? std::min(cached, window_) : cached; }

  // Prepares a pass: makes room for its new rows, and sets the addresses of its rows.
  void begin(const dlm_pass& pass, CacheUse use, KeyValues& pointers) {
    const int32_t cached = rows_of(pass.cached);
    if (use != CacheUse::none && pass.cached > 0) check_kept(pass.cached);
    if (use == CacheUse::write) lay_out(pass.batch, pass.tokens, pass.tokens);
    if (use == CacheUse::append) make_room(pass.batch, cached, pass.tokens);
    if (storage_ == nullptr) return;
    for (const Tensor& tensor : tensors_) {
      std::byte* const rows = storage_.get() + tensor.start;
      pointers.set_past(tensor.number, rows);
      pointers.set_present(tensor.number, rows + heads_ * cached * tensor.row);
    }
  }

  // Records that a pass has stored its rows.
  void end(const dlm_pass& pass, CacheUse use) {
    // The positions of drafted rows are moved. Only passes that append rows have drafted rows.
    const auto first =
        use == CacheUse::append ? pass.cached : static_cast<int32_t>(pass.position_ids[0]);
    if (window_ > 0)
      next_ = pass.cached, written_ = pass.tokens;
    else
      slots_.note_written(first, pass.tokens, pass.cached);
  }

  void keep_outside(int32_t first, int32_t last) {
    if (window_ > 0) return keep_window(first, last);
    const std::vector<Slots::Move> moves = slots_.keep_outside(first, last);
    for (const Tensor& tensor : tensors_) apply(moves, storage_.get() + tensor.start, tensor.row);
  }

  uint64_t used_bytes() const { return used_bytes_; }

 private:
  struct Tensor {
    size_t number, row, start;  // row: bytes of a row. start: the tensor's offset in the storage
  };

  void check_kept(int32_t cached) const {
    const int32_t kept = window_ > 0 ? kept_ : slots_.kept();
    if (kept != rows_of(cached) || (window_ > 0 && next_ != cached))
      fail(DLM_INTERNAL, "a pass over %d cached rows a head, but %d are kept", rows_of(cached),
           kept);
  }

  // With a window, keeps the rows of the positions before `first` that a pass from `first` on
  // reads. The rows of a head stay in the order of their positions.
  void keep_window(int32_t first, int32_t last) {
    const int32_t from = std::max(0, first - window_), begun = next_ - kept_;
    if (first < next_ || first > next_ + written_ || last < next_ + written_)
      fail(DLM_INTERNAL, "a pass over positions %d to %d, but layers with a window keep %d to %d",
           first, last, begun, next_ + written_);
    // `old` of the cached rows and `fresh` of the new rows are kept.
    const size_t kept = kept_, old = std::max(0, next_ - from), written = written_,
                 skipped = std::max(0, from - next_), fresh = first - next_ - skipped,
                 now = old + fresh;
    for (const Tensor& tensor : tensors_) {
      const size_t row = tensor.row;
      std::byte* const rows = storage_.get() + tensor.start;
      const std::byte* const added = rows + heads_ * kept * row;
      fresh_.assign(added, added + heads_ * written * row);
      // A head never has fewer rows than before. So the last head is moved first.
      for (size_t head = heads_; head-- > 0;) {
        std::byte* const to = rows + head * now * row;
        std::memmove(to, rows + ((head + 1) * kept - old) * row, old * row);
        std::memcpy(to + old * row, fresh_.data() + (head * written + skipped) * row, fresh * row);
      }
    }
    next_ = first, kept_ = static_cast<int32_t>(now), written_ = 0;
  }

  size_t bytes_of(int32_t batch, int32_t rows) const {
    size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(batch) * kv_heads_ * sum_,
                               static_cast<size_t>(rows), &bytes))
      throw std::bad_alloc();
    return bytes;
  }

  // Divides the storage between the tensors, with `rows` rows for every head.
  void place(int32_t rows) {
    size_t start = 0;
    for (Tensor& tensor : tensors_) {
      tensor.start = start;
      start += heads_ * rows * tensor.row;
    }
    capacity_ = rows;
    if (window_ == 0) slots_.lay_out(heads_, rows);
  }

  // Lays out the storage with at least `rows` rows per head. If the storage already has room for
  // more rows, lays it out for up to `most` rows per head. The storage never shrinks.
  void lay_out(int32_t batch, int32_t rows, int32_t most) {
    used_bytes_ = 0;
    const size_t bytes = bytes_of(batch, rows);
    if (bytes > storage_bytes_) {
      storage_bytes_ = 0;
      storage_.reset();
      storage_.reset(new std::byte[bytes]);  // make_unique would fill all the memory with zeros
      storage_bytes_ = bytes;
    }
    heads_ = static_cast<size_t>(batch) * kv_heads_;
    used_bytes_ = bytes;
    kept_ = next_ = written_ = 0;
    place(
        static_cast<int32_t>(std::min(static_cast<size_t>(most), storage_bytes_ / (bytes / rows))));
  }

  // Makes room for `tokens` new rows after the `cached` rows of each head. The cached rows keep
  // their content.
  void make_room(int32_t batch, int32_t cached, int32_t tokens) {
    const int32_t rows = cached + tokens;
    if (cached == 0) return lay_out(batch, rows, std::max(rows, longest_));
    if (rows > capacity_) {
      // With a window, a later pass of as many tokens never needs more rows.
      const int32_t largest = window_ > 0 ? std::min(longest_, window_ + tokens) : longest_;
      const int32_t most = grown(capacity_, rows, largest);
      const size_t bytes = bytes_of(batch, most);
      std::unique_ptr<std::byte[]> storage(new std::byte[bytes]);
      size_t start = 0;
      for (const Tensor& tensor : tensors_) {
        std::memcpy(storage.get() + start, storage_.get() + tensor.start,
                    heads_ * cached * tensor.row);
        start += heads_ * most * tensor.row;
      }
      storage_ = std::move(storage);
      storage_bytes_ = bytes;
      place(most);
    }
    used_bytes_ = std::max<uint64_t>(used_bytes_, bytes_of(batch, rows));
  }

  const int32_t kv_heads_, window_, longest_;
  std::vector<Tensor> tensors_;
  size_t sum_ = 0;  // bytes of one row, added up over all tensors
  std::unique_ptr<std::byte[]> storage_;
  int32_t capacity_ = 0;  // allocated rows per head
  size_t heads_ = 0, storage_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  Slots slots_;  // for layers without a window
  // For layers with a window. kept_: number of cached rows of each head, which are the rows of the
  // positions before next_. written_: number of new rows of each head, from next_ on.
  int32_t kept_ = 0, next_ = 0, written_ = 0;
  std::vector<std::byte> fresh_;  // the new rows of a tensor while they are moved
};

class HostContext final : public Context {
 public:
  HostContext(HostEngine& engine, const CacheShape& cache, int32_t longest)
      : engine_(engine), window_(window_of(cache)), pointers_(cache.size()) {
    for (size_t i = 0; i < cache.size(); ++i) {
      auto found = std::find_if(groups_.begin(), groups_.end(),
                                [&](const LayerGroup& group) { return group.suits(cache[i]); });
      if (found == groups_.end()) {
        groups_.emplace_back(cache[i].kv_heads, cache[i].window, longest);
        found = groups_.end() - 1;
      }
      found->add(i, cache[i]);
    }
  }

  void run(const Pass& wanted, CacheUse use, bool) override {
    Pass pass = wanted;
    for (LayerGroup& group : groups_) group.begin(pass, use, pointers_);
    pointers_.put(pass, use != CacheUse::none && pass.cached > 0, keeps_rows(use));
    engine_.run(pass, {}, {std::min(pass.cached, window_)});
    if (!keeps_rows(use)) return;
    for (LayerGroup& group : groups_) group.end(pass, use);
  }

  void keep_outside(int32_t first, int32_t last) override {
    for (LayerGroup& group : groups_) group.keep_outside(first, last);
  }

  uint64_t cache_bytes() const override {
    return std::accumulate(
        groups_.begin(), groups_.end(), uint64_t{0},
        [](uint64_t sum, const LayerGroup& group) { return sum + group.used_bytes(); });
  }

 private:
  HostEngine& engine_;
  const int32_t window_;
  KeyValues pointers_;
  std::vector<LayerGroup> groups_;
};

class None final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  void run(const Pass&, const std::vector<Segment>&, const WindowRows&) override {
    fail(DLM_UNSUPPORTED,
         "the bundle was opened with engine \"none\", which runs no passes: open it with another "
         "engine");
  }

  std::string description() const override { return "none"; }
};

}  // namespace

std::unique_ptr<Context> HostEngine::open_context(int32_t longest) {
  CacheShape cache = cache_;
  // A layer whose window is the longest canvas keeps the rows of all positions in order.
  if (is_in_order_)
    for (CacheLayer& layer : cache) layer.window = longest;
  return std::make_unique<HostContext>(*this, cache, longest);
}

std::unique_ptr<Arena> Engine::open_arena(int32_t, RowCounts, int64_t) { return nullptr; }

std::unique_ptr<Arena> HostEngine::open_arena(int32_t page_rows, RowCounts rows,
                                              int64_t most_idle) {
  if (!takes_segments()) return nullptr;
  return std::make_unique<Arena>(*this, cache_, make_row_memory(), page_rows, rows, most_idle);
}

std::unique_ptr<RowMemory> HostEngine::make_row_memory() { return make_host_memory(); }

std::unique_ptr<Engine> make_none(CacheShape cache) {
  return std::make_unique<None>(std::move(cache));
}

}  // namespace dlm
