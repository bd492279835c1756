// The interface between the decoding loop and the engines that run the denoiser.
//
// An Engine owns the denoiser's weights, which all threads share. Each session opens a Context,
// which owns the session's buffers and its cached keys and values. The buffers, keys and values are
// in the memory that the engine uses (host or device). The decoding loop never accesses the keys
// and values. For each pass, the loop only tells the Context how the pass uses the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/one_line.h"
#include "base/segment.h"
#include "dlm_runtime.h"
#include "engines/draws.h"

namespace dlm {

// The shape and element type of one layer's cache. The keys have the shape [B, kv_heads, rows,
// head_size] for B requests, and so do the values. If the element type is int8, each row ends with
// its scale. If `window` is not 0, a pass over positions from p on reads only the cached rows of
// the positions from p - window on. All layers with a window have the same window.
struct CacheLayer {
  int32_t kv_heads, head_size, element_bytes, scale_bytes = 0, window = 0;

  size_t row_bytes() const { return static_cast<size_t>(head_size) * element_bytes + scale_bytes; }
  size_t tensor_bytes(int32_t batch, int32_t rows) const {
    return static_cast<size_t>(batch) * kv_heads * rows * row_bytes();
  }
};

// The caches of all layers, one entry per layer.
using CacheShape = std::vector<CacheLayer>;

// Returns the number of bytes of one cache row: the keys and values of one token in all layers.
inline uint64_t row_bytes(const CacheShape& cache) {
  uint64_t row = 0;
  for (const CacheLayer& layer : cache) row += 2 * layer.tensor_bytes(1, 1);
  return row;
}

// Returns the number of bytes of one cache row in the layers with a window.
inline uint64_t window_row_bytes(const CacheShape& cache) {
  uint64_t row = 0;
  for (const CacheLayer& layer : cache) row += layer.window > 0 ? 2 * layer.tensor_bytes(1, 1) : 0;
  return row;
}

// Returns the window of the layers that have a window, or 0 if no layer has a window.
inline int32_t window_of(const CacheShape& cache) {
  int32_t window = 0;
  for (const CacheLayer& layer : cache) window = std::max(window, layer.window);
  return window;
}

// Two numbers of cache rows: in the layers without a window, and in the layers with a window. A
// layer with a window needs fewer rows for a long canvas.
struct RowCounts {
  int64_t full = 0, window = 0;

  bool fits(const RowCounts& room) const { return full <= room.full && window <= room.window; }
  RowCounts operator+(const RowCounts& other) const {
    return {full + other.full, window + other.window};
  }
  RowCounts operator-(const RowCounts& other) const {
    return {full - other.full, window - other.window};
  }
};

// The cached rows that the layers with a window read in a pass. `cached` is S for these layers, and
// `segments` are their segments. They have the same order and the same tokens as the segments of
// the other layers. A request has the rows of the last positions before the pass, in order.
struct WindowRows {
  int32_t cached = 0;
  std::vector<Segment> segments{};
};

// The properties of the denoiser that the decoding loop needs. All of them have been checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, top_k, shift;
  bool has_cache;
  CacheShape cache;  // never empty; unused if has_cache is false
  std::vector<int32_t> eos_token_ids;
  int32_t visible_block = 0;     // block length of block-causal attention; 0: full attention
  int32_t max_new_tokens = 128;  // default limit for the new tokens of a request
  // The number of tokens of a draft pass; 0: the denoiser has no draft passes. With shift 0, each
  // row of a draft pass sees all rows of the pass. All other passes of such a denoiser are causal.
  // With shift 1, all passes are causal (see has_causal_drafts), unless has_shifted_drafts.
  int32_t draft_block = 0;
  // True if the denoiser has low-rank updates for draft passes whose tokens are verified.
  bool has_draft_updates = false;
  // The width of the self-conditioning that a draft pass returns for the next draft pass over the
  // same block; 0: the denoiser has no self-conditioning.
  int32_t conditioning_size = 0;
  // True if contexts keep self-conditioning in their own memory, see Engine::keeps_conditioning.
  bool keeps_conditioning = false;
  // Ranges [first, last) of ids that are no tokens. They are never predicted.
  std::vector<std::pair<int32_t, int32_t>> unused_tokens{};
  // The tokens that change the length of a canvas; -1: the denoiser has no such tokens. A decided
  // expand token becomes two mask tokens, and a decided delete token is removed (DreamOn).
  int32_t expand_token_id = -1, delete_token_id = -1;
  // If it is not -1, passes rewrite their block (LLaDA2.2): a predicted split token inserts a mask
  // token, and a predicted delete_token_id removes its position.
  int32_t split_token_id = -1;
  // True if draft passes decide the text, and shift is 1 (SDLM). The first draft row is the last
  // decided token, and the others are mask tokens. They see all rows of the pass. The rows before
  // them are causal, and store decided tokens.
  bool has_shifted_drafts = false;
  // True if the positions before the first undecided one form one block, and the first block of
  // visible_block positions starts after them (D2F).
  bool blocks_after_prompt = false;

  // Returns true if the cached rows of a prompt's first blocks do not depend on later tokens. So
  // several passes can compute the prompt, and requests can share its rows.
  bool splits_prompts() const { return visible_block > 0 && !blocks_after_prompt; }

  bool resizes() const { return expand_token_id >= 0; }
  bool rewrites() const { return split_token_id >= 0; }

  // Returns the width of the self-conditioning in the arrays of a pass. The width is 0 if contexts
  // keep self-conditioning.
  int32_t passed_conditioning() const { return keeps_conditioning ? 0 : conditioning_size; }

  // Returns false if the denoiser has no mask token, and starts from random tokens. Then
  // mask_token_id is vocab_size. This number marks undecided positions in canvases, and is never an
  // input of a pass.
  bool has_mask_token() const { return mask_token_id < vocab_size; }

  // Returns true if the denoiser is an autoregressive network that drafts tokens (Uno, I-DLM). A
  // pass may end with draft rows, which contain mask tokens, or random tokens if there is no mask
  // token. The low-rank updates apply to these rows. Each row of any pass predicts the next
  // position.
  bool has_causal_drafts() const { return draft_block > 0 && shift == 1 && !has_shifted_drafts; }

  bool is_end(int32_t token) const {
    return std::find(eos_token_ids.begin(), eos_token_ids.end(), token) != eos_token_ids.end();
  }
};

// The draws of a pass whose logits stay on the device (Engine::draws). The arrays have one entry
// for each scored row.
struct Draws {
  const Denoiser* denoiser = nullptr;
  std::vector<DrawRow> rows;
  std::vector<Drawn> drawn;  // the results; only those of rows with a temperature are valid
};

// A pass, as the decoding loop and the engines see it.
struct Pass : dlm_pass {
  // If this is not NULL, the engine draws tokens and applies guidance, and `logits` is NULL. The
  // candidates and the entropies of guided rows are then those of the guided logits.
  Draws* draws = nullptr;
};

// How a pass uses the cache of its context. T is the number of new tokens in the pass. S is the
// number of cached positions that the pass reads.
enum class CacheUse {
  none,  // reads no rows (S is 0), and does not store the T new rows
  // Reads no rows (S is 0). Stores the T new rows, and drops all other rows. A call of keep_outside
  // then selects the new rows that later passes read. The pass also sets the batch size of the
  // cache.
  write,
  read,     // reads the S rows that keep_outside selected, and stores no rows
  refresh,  // reads the same rows as `read`, and stores the T new rows
  append    // reads the rows of positions 0 to S - 1, and stores the T new rows after them
};

// Returns true if a pass with this CacheUse stores its new rows.
constexpr bool keeps_rows(CacheUse use) { return use != CacheUse::none && use != CacheUse::read; }

// Returns the number of rows to allocate if `rows` rows are needed. If the memory must grow, its
// size at least doubles, so that rows are rarely copied. The result is at most `longest`, the
// length of the longest canvas, or `rows` if `rows` is larger.
inline int32_t grown(int32_t capacity, int32_t rows, int32_t longest) {
  return std::max(rows, capacity > longest / 2 ? longest : 2 * capacity);
}

// Contains pointers to the keys and values of all layers, and writes these pointers into a
// dlm_pass.
class KeyValues {
 public:
  explicit KeyValues(size_t layers) : nothing_(layers) {
    for (const int i : {0, 1}) past_[i].resize(layers), present_[i].resize(layers);
  }

  // Sets the address of one tensor. Tensor 2i contains the keys of layer i, and tensor 2i + 1
  // contains the values.
  void set_past(size_t tensor, const void* rows) { past_[tensor % 2][tensor / 2] = rows; }
  void set_present(size_t tensor, void* rows) { present_[tensor % 2][tensor / 2] = rows; }

  // Sets the pointers in a pass. They are valid until this object is destroyed.
  void put(dlm_pass& pass, bool has_past, bool has_present) const {
    pass.layers = static_cast<int32_t>(nothing_.size());
    pass.past_keys = (has_past ? past_[0] : nothing_).data();
    pass.past_values = (has_past ? past_[1] : nothing_).data();
    pass.present_keys = has_present ? present_[0].data() : nullptr;
    pass.present_values = has_present ? present_[1].data() : nullptr;
  }

 private:
  std::vector<const void*> nothing_, past_[2];  // nothing_ contains NULL for every layer
  std::vector<void*> present_[2];
};

class Context {
 public:
  virtual ~Context() = default;

  // Runs one pass over consecutive positions, which are the same for all requests of the batch. The
  // context sets the field `layers` and the pointers to keys and values. The caller sets all other
  // fields of the pass. If the context keeps self-conditioning, has_conditioning says whether the
  // pass uses what the last pass returned. If it is false, all numbers are 0. Throws an Error with
  // status DLM_ENGINE_FAILED, or another error that ends the request.
  virtual void run(const Pass& pass, CacheUse use, bool has_conditioning) = 0;

  // Selects the rows that later passes read: the rows of all positions before `first`, and of all
  // positions from `last` on. Each of these rows must be in the cache already, or must have been
  // computed by the last pass. The context may store the rows in any order, because keys contain
  // the position encoding. In layers with a window, the context stores rows in the order of their
  // positions, and may drop the rows that no pass from `first` on reads.
  virtual void keep_outside(int32_t first, int32_t last) = 0;

  // Returns the number of bytes of the keys and values of all requests in the batch, for all
  // positions of their canvases. With `append`, counts only the positions that were appended so
  // far.
  virtual uint64_t cache_bytes() const = 0;
};

class Arena;
class RowMemory;

class Engine {
 public:
  virtual ~Engine() = default;

  // Opens a context. Only one thread may use a context at a time. The engine must outlive the
  // context. `longest` is the denoiser's max_canvas_length, which limits how far the cache grows
  // with `append`.
  virtual std::unique_ptr<Context> open_context(int32_t longest) = 0;

  // Returns true if a context keeps the self-conditioning that a pass returns in its own memory,
  // for the next pass. Then the fields conditioning and next_conditioning of all passes are NULL,
  // and max_batch() is 1.
  virtual bool keeps_conditioning() const { return false; }

  // Returns true if passes can draw tokens and apply guidance (Pass::draws), so that their logits
  // need not be copied to the host. The first call may take a second, because the engine then
  // compiles its kernel. Several threads may call this function at the same time.
  virtual bool draws() const { return false; }

  // Returns true if one pass can run several requests of different sizes, one per segment of the
  // pass. If this is false, only requests of the same size can share passes.
  virtual bool takes_segments() const { return false; }

  // Returns the largest number of tokens in a pass that several requests share. `longest` is the
  // denoiser's max_canvas_length. Two canvases of this length always fit, for guidance.
  virtual int32_t most_shared_tokens(int32_t /*longest*/) const { return INT32_MAX; }

  // Allocates cache rows for passes that several requests share. The arguments are those of Arena's
  // constructor. Returns NULL if the engine does not support these passes. The engine must outlive
  // the arena.
  virtual std::unique_ptr<Arena> open_arena(int32_t page_rows, RowCounts rows, int64_t most_idle);

  // Returns one line of text with the engine's name, version and provider.
  virtual std::string description() const = 0;

  // Returns the largest number of rows that a pass of `tokens` new tokens and `cached` cached
  // tokens may score. Returns 0 if the engine cannot run such a pass.
  virtual int32_t max_rows(int32_t /*tokens*/, int32_t /*cached*/) const { return INT32_MAX; }

  // Returns the largest number of requests that one pass can run.
  virtual int32_t max_batch() const { return INT32_MAX; }

  // Describes the limits of max_rows, for messages. Returns "" if there are no limits.
  virtual std::string limits() const { return ""; }
};

// The base class of engines that need only the buffers in dlm_pass. A context of such an engine
// owns the cached rows, and sets the pointers of each pass to these rows. The cache is in host
// memory, unless a derived class opens another type of context.
class HostEngine : public Engine {
 public:
  // If `is_in_order` is true, contexts store the rows of all layers in the order of their
  // positions.
  explicit HostEngine(CacheShape cache, bool is_in_order = false)
      : cache_(std::move(cache)), is_in_order_(is_in_order) {}

  std::unique_ptr<Context> open_context(int32_t longest) override;
  std::unique_ptr<Arena> open_arena(int32_t page_rows, RowCounts rows, int64_t most_idle) override;

  // Runs a pass. The caller has set all fields of dlm_pass. Several contexts may call this function
  // at the same time. If `segments` is empty, the pass runs B requests of the same shape. Otherwise
  // B is 1, and the segments say which tokens and cached rows belong to which request. Then S is
  // the number of cached rows that the segments can refer to. For layers with a window, `window`
  // takes the place of S and of the segments.
  virtual void run(const Pass& pass, const std::vector<Segment>& segments,
                   const WindowRows& window) = 0;

 protected:
  // Returns the memory of an arena. By default, this is host memory.
  virtual std::unique_ptr<RowMemory> make_row_memory();

  const CacheShape cache_;

 private:
  const bool is_in_order_;
};

// The names of a graph's inputs and outputs.
struct PortNames {
  struct Layer {
    std::string past_key, past_value, present_key, present_value;
  };
  std::string input_ids, position_ids, score_rows, top_token, top_prob, top_log_odds, entropy,
      logits;
  std::string segments{};  // "" if the graph does not have this input
  // The segments of layers with a window. "" if the graph does not have this input.
  std::string window_segments{};
  // The inputs of device.onnx that choose cached rows. "" if it does not have these inputs.
  std::string cached_rows{}, cached_requests{}, token_requests{};
  // The same for layers with a window.
  std::string window_rows{}, window_requests{}, window_distances{};
  // "" if the denoiser has no self-conditioning
  std::string conditioning{}, temperature{}, next_conditioning{};
  std::vector<Layer> layers{};
};

// The properties of a bundle's graph that engines need. They come from the manifest.
struct GraphSpec {
  std::string path;         // path of denoiser.onnx
  std::string device_path;  // path of device.onnx, a version of the graph for GPUs; may be empty
  int32_t vocab_size, top_k;
  CacheShape cache;
  int32_t cache_type;             // element type of the cache, see engines/graph_check.h
  bool simulated;                 // true: the graph computes on quantised numbers in floating point
  PortNames ports;                // has one entry for each layer of `cache`
  int32_t conditioning_size = 0;  // see Denoiser
  bool is_in_order = false;       // true: cached rows must be in the order of their positions
};

// The smallest and the largest size that a profile of an engine accepts, and the size for which
// TensorRT tuned the profile.
struct Sizes {
  int32_t smallest, best, largest;
};

// The sizes of the passes that one profile of a TensorRT engine accepts. A profile is a range of
// input sizes for which TensorRT has optimised the engine.
struct Profile {
  Sizes tokens, cached, rows;
};

// Formats a compute capability for messages. For example, 89 becomes "8.9".
inline std::string sm_text(int32_t sm) {
  return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

// One TensorRT engine of a bundle, as the manifest describes it.
struct EngineSpec {
  std::string target, path, builder, version;  // builder is "tensorrt" or "tensorrt_rtx"
  std::string bundle;                          // the bundle's folder, for messages
  std::vector<int32_t> sm;  // compute capabilities of the GPUs that can run the engine; 89 means
                            // 8.9
  Profile prefill, block;   // the engine's profiles 0 and 1
  bool is_version_compatible = false;  // TensorRT's lean runtime can run it, too
};

// Selects the provider of ONNX Runtime that runs the graph. The fields have the same names and
// defaults as in dlm_open_options.
struct ProviderChoice {
  std::string name = "cpu";
  int32_t device = 0;
  bool allow_fallback = false;
  std::string library{};  // provider_library
  bool cuda_graphs = false;

  bool is_gpu() const { return name != "cpu"; }
};

// The program's function for log lines. The fields have the same meanings as in dlm_open_options.
struct Log {
  dlm_log_fn on_log = nullptr;
  void* user = nullptr;
  int32_t severity = DLM_LOG_WARNING;

  // Passes a message of the engine's library to the program's function. If there is no memory for
  // the message, drops it.
  void write(int32_t line_severity, const char* text) const noexcept {
    try {
      on_log(user, line_severity, one_line(text).c_str());
    } catch (const std::bad_alloc&) {
    }
  }
};

// Opens an engine that runs the graph with ONNX Runtime. Loads libonnxruntime from the path
// `library`. If `library` is empty, searches for libonnxruntime as described in dlm_runtime.h at
// dlm_open_options.engine_library. If `threads` is 0, the engine uses all cores. Throws an Error
// with status DLM_ENGINE_MISSING if the library, its provider or a dependency is missing. Throws an
// Error with status DLM_UNSUPPORTED if nodes of the graph would run on the CPU, but `provider` does
// not allow that.
std::unique_ptr<Engine> open_onnxruntime(const GraphSpec& graph, const std::string& library,
                                         int threads, const ProviderChoice& provider,
                                         const Log& log);

// Opens the TensorRT engine of the bundle that can run on this device with the installed TensorRT.
// Loads TensorRT from the path `library`. If `library` is empty, searches for TensorRT as described
// in dlm_runtime.h at dlm_open_options.engine_library. Throws an Error with status
// DLM_ENGINE_MISSING if the library or a dependency is missing. Throws an Error with status
// DLM_UNSUPPORTED if no engine of the bundle can run.
std::unique_ptr<Engine> open_tensorrt(const GraphSpec& graph,
                                      const std::vector<EngineSpec>& engines,
                                      const std::string& library, const Log& log);

// Makes an engine that calls the program's function `run` for each pass. If `run` returns a NaN or
// +inf logit for a position, the engine sets the probabilities for this position to NaN. Then the
// request ends with an error.
std::unique_ptr<HostEngine> make_callback(dlm_pass_fn run, void* user, const Denoiser& denoiser);

// Makes an engine that cannot run passes, for a program that only inspects a bundle. Every pass
// throws an Error with status DLM_UNSUPPORTED.
std::unique_ptr<Engine> make_none(CacheShape cache);

}  // namespace dlm
