/* dlm_runtime.h: the whole C ABI of libdlm_runtime, the native runtime of dlm-export.
 *
 * It opens a bundle (a folder that `dlm-export build` wrote) and fills canvases of mask tokens with
 * the bundle's denoiser.
 *
 * Conventions
 * - Every call that can fail returns dlm_status; results come through the trailing out-pointer,
 * NULL or 0 on failure.
 * - Who creates destroys; destroying NULL is fine. Pointers passed in are borrowed for the call
 * only, except where said.
 * - Structs that the caller fills start with struct_size: set them up with their _init function,
 * then change fields. They grow at their end alone. A program that was compiled with an older
 * header goes on: what its structs lack has its default, and nothing is written behind their end. A
 * struct that is larger than the library knows is refused with INVALID_ARGUMENT: the program was
 * compiled with the header of a newer library.
 * - A function that fills such a struct before its struct_size is known is a macro over one that is
 * told the size, name_sized, which bindings in other languages call. The function behind the
 * macro's name fills the struct of the first header of DLM_ABI_VERSION 3, for programs that were
 * compiled with that.
 * - Threads: a bundle may be shared by any number of threads; a session belongs to one thread at a
 * time, but for dlm_session_cancel; a scheduler may be shared, and each of its jobs belongs to one
 * thread at a time, but for dlm_job_cancel. A bundle must outlive its sessions and schedulers.
 * - Nothing is printed, no global is kept, no exception and no exit leaves the library.
 * - Text is UTF-8 and NUL-terminated; token ids are int32; a canvas is a row of token ids.
 */
#ifndef DLM_RUNTIME_H
#define DLM_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLM_API __attribute__((visibility("default")))

/* Raised when a struct or a call changes in a way that a program compiled before would not survive.
 * It is not raised when a struct that starts with struct_size gets a field at its end, or the
 * library a function. */
#define DLM_ABI_VERSION 3
DLM_API uint32_t dlm_abi_version(void);
DLM_API const char* dlm_version(void); /* "0.1.0", static */

typedef int32_t dlm_status;
enum {
  DLM_OK = 0,
  DLM_INVALID_ARGUMENT =
      1, /* the request is wrong: an id outside the vocabulary, an unknown policy value, ... */
  DLM_NOT_FOUND = 2,  /* a bundle, one of its files, or a preset is not there */
  DLM_BAD_BUNDLE = 3, /* damaged, hostile, or of a schema version that this library does not know */
  DLM_UNSUPPORTED = 4,   /* well-formed, but not something that this library or denoiser can do */
  DLM_ENGINE_FAILED = 5, /* the inference engine reported an error, or its results are not finite */
  DLM_OUT_OF_MEMORY = 6,
  DLM_CANCELLED = 7, /* a callback of the caller's asked to stop, and the request was dropped */
  DLM_INTERNAL = 8,  /* a defect of ours; please report it with the message */
  DLM_ENGINE_MISSING = 9, /* the engine's library is not there, too old, or cannot be loaded */
  DLM_BUSY = 10           /* as many requests wait as may: hand it in again later */
};
DLM_API const char* dlm_status_name(dlm_status status); /* static, never NULL */

typedef struct dlm_bundle dlm_bundle;
typedef struct dlm_session dlm_session;

/* ---- Denoiser and passes
 * -------------------------------------------------------------------------------------------- */

/* What the loop must know of a denoiser. Shape letters: B requests of a pass, T tokens of each, S
 * cached tokens, R scored rows, V vocabulary, K candidates a row. */
typedef struct dlm_denoiser {
  size_t struct_size;
  int32_t vocab_size;        /* V */
  int32_t mask_token_id;     /* 0..V-1 */
  int32_t max_canvas_length; /* tokens */
  int32_t layers;
  int32_t kv_heads;
  int32_t head_size;
  int32_t top_k;            /* K: candidates that a pass returns for a row, at least 2 */
  int32_t kv_element_bytes; /* 4: fp32, 2: fp16 or bf16, 1: int8 (a row has 2 more); the loop only
                               moves these bytes */
  int32_t shift;            /* 1: the row of position i predicts position i + 1 */
  int32_t has_cache;        /* 1: a pass takes past and gives present keys and values */
  const int32_t* eos_token_ids; /* borrowed for the call */
  size_t eos_count;
  int64_t visible_block; /* n: no row sees a later block of n positions, counted from 0
                            (block-causal); 0: every row sees all */
} dlm_denoiser;
DLM_API void dlm_denoiser_init(dlm_denoiser* denoiser);
DLM_API void dlm_denoiser_init_sized(dlm_denoiser* denoiser, size_t struct_size);
#define dlm_denoiser_init(denoiser) dlm_denoiser_init_sized(denoiser, sizeof(dlm_denoiser))

/* One pass of the denoiser, over the same positions of B requests that know nothing of each other.
 * The engine reads the const members and fills the others. B is 1 unless dlm_session_generate_batch
 * or dlm_session_time_passes asks for more. Keys and values are [B, kv_heads, rows, head_size] a
 * layer, position-encoded; rows = S for past, T for present. */
typedef struct dlm_pass {
  int32_t batch;               /* B */
  int32_t tokens;              /* T */
  int32_t cached;              /* S */
  int32_t rows;                /* R */
  int32_t layers;              /* length of the four arrays of pointers */
  const int64_t* input_ids;    /* [B, T] */
  const int64_t* position_ids; /* [B, T], absolute */
  const int64_t* score_rows;   /* [B, R], 0..T-1 */
  const void *const *past_keys, *const *past_values;
  void *const *present_keys, *const *present_values; /* NULL when the loop has no use for them */
  int32_t*
      top_tokens;   /* [B, R, K], best first, lowest id first among equals, never the mask token */
  float* top_probs; /* [B, R, K], softmax in fp32 with the mask token excluded */
  float* entropy; /* [B, R], sum p ln(p + 1e-10) <= 0, the mask token excluded; NULL when not asked
                     for */
  float* logits;  /* [B, R, V], raw: finite, or -infinity for a token that is ruled out; NULL when
                     not asked for. The mask token's logit is not read. A row with NaN or +infinity
                     ends its request with ENGINE_FAILED */
} dlm_pass;

/* Runs one pass; returns DLM_OK or any other status, which ends the request. The session that it
 * runs for is busy. */
typedef dlm_status (*dlm_pass_fn)(void* user, const dlm_pass* pass);

/* ---- Policy
 * ---------------------------------------------------------------------------------------------------------
 */

/* What to commit after each pass; presets of a bundle fill it, callers change fields. Values are
 * strings, so that a policy reads the same in C, in Python and in manifest.json. The strings are
 * borrowed: literals, or the bundle's own. */
typedef struct dlm_policy {
  size_t struct_size;
  const char* select;  /* "argmax" | "sample": a draw at `temperature` */
  const char* score;   /* "confidence" | "margin" | "entropy" | "random" */
  const char* commit;  /* "static" | "threshold" | "dynamic" | "factor" | "entropy_bound" |
                          "timestep" | "sequential" */
  const char* compare; /* ">" | ">=": how scores meet the threshold */
  const char*
      remask; /* "none" | "edit": a finished block's tokens may still change, see edit_threshold */
  const char* cache;    /* "none" | "prefix" | "dual", of full attention | "block", "block-dual", of
                           block-causal attention, the latter with passes over a sub-block alone */
  const char* stop;     /* "eos": blocks after one that committed eos are not run | "none" */
  int32_t block_length; /* tokens; 0: the whole generation is one block. Where attention is
                           block-causal, blocks are counted from position 0, 0 takes visible_block,
                           and any other is a multiple of it */
  int32_t steps_per_block; /* passes planned a block; 0: one a token */
  int32_t refresh;  /* of "prefix" and "dual". 0: every block starts with a full pass. N: the first
                       one does, and each later one with a pass over the N tokens before it, the
                       block decided before it at least, and what its other passes run over */
  double threshold; /* of "threshold" and "dynamic", 0..1 */
  double factor;    /* of "factor", >= 0 */
  double entropy_bound; /* of "entropy_bound", nats, >= 0 */
  double timestep_eps;  /* of "timestep", 0..1 */
  double temperature;   /* of "sample", above 0, at most 1e300: logits are divided by it; 0 for
                           "argmax" */
  uint64_t seed; /* of "random" and "sample": the same text, whatever the engine, its threads and
                    the batch, but for what floating-point noise of the engine changes */
  const char* store; /* of "block": how a finished block is stored. "pass": by one more pass over
                        it, which is exact | "open": that pass also runs the next block and decides
                        in it; the canvas is the same | "reuse": the rows of its last pass are
                        stored; some of its tokens were still masked then */
  int32_t sub_block_length; /* of block-causal attention: positions of a block that are decided
                               before the next ones; divides block_length. 0: all together */
  int32_t edit_passes;   /* of "edit": passes over a finished block, at most; the first that changes
                            nothing is the last */
  double edit_threshold; /* of "edit", 0..1: a token of a finished block changes where another one's
                            probability is above it */
  double top_p;          /* of "sample", 0..1: from as few of the best tokens as have more than this
                            probability together */
  int32_t top_k;         /* of "sample": from this many of the best tokens; 0: all */
  const char* score_of;  /* what scores are of. "prediction": the denoiser's softmax | "draw", of
                            "sample": the distribution that is drawn from, by temperature, top_p and
                            top_k | "marginal": of a constrained request the softmax of all texts
                            that the constraint has, else "prediction" */
  double cfg_scale; /* w of classifier-free guidance: each pass also runs the canvas with all that
                       is given masked, and logits are without + (w + 1)(with - without); 0: none.
                       UNSUPPORTED where the engine takes one request a pass */
} dlm_policy;
/* LLaDA's: static, confidence, blocks of 32, no cache. */
DLM_API void dlm_policy_init(dlm_policy* policy);
DLM_API void dlm_policy_init_sized(dlm_policy* policy, size_t struct_size);
#define dlm_policy_init(policy) dlm_policy_init_sized(policy, sizeof(dlm_policy))

enum {
  DLM_FIELD_CHOICE = 0 /* const char * */,
  DLM_FIELD_INT32 = 1,
  DLM_FIELD_DOUBLE = 2,
  DLM_FIELD_UINT64 = 3
};

/* What the library knows of one field of dlm_policy, for tools and for bindings in other languages.
 */
typedef struct dlm_policy_field {
  const char* name;
  int32_t kind;               /* DLM_FIELD_CHOICE, ... */
  size_t offset;              /* bytes from the start of dlm_policy */
  const char* const* choices; /* of DLM_FIELD_CHOICE: its values, the default first and NULL behind
                                 the last; else NULL */
  double initial;             /* of the others: the default, */
  double lowest, highest;     /* and the range, both ends included */
} dlm_policy_field;

/* The fields in the order of dlm_policy, counted from 0 and without struct_size; NULL behind the
 * last. Static. */
DLM_API const dlm_policy_field* dlm_policy_field_at(size_t index);

/* ---- Bundle
 * ---------------------------------------------------------------------------------------------------------
 */

typedef struct dlm_open_options {
  size_t struct_size;
  const char*
      engine; /* "auto" (default): "tensorrt" if the bundle was built for GPUs, else "onnxruntime";
                 "onnxruntime" | "tensorrt" | "none": the bundle is checked, and makes no passes */
  const char* engine_library; /* path of the engine's library: libonnxruntime, libnvinfer or
                                 libtensorrt_rtx; NULL: $DLM_ONNXRUNTIME or $DLM_TENSORRT, then the
                                 system's */
  int32_t threads; /* of onnxruntime, 0..4096; 0: all cores. More than the cores that the process
                      may use: as many as these, as further threads only slow passes down */
  int32_t check_hashes;   /* 1: compare every file with the SHA-256 in the manifest (default); 0:
                             sizes only */
  const char* provider;   /* of onnxruntime: "cpu" (default) | "cuda" | "tensorrt" |
                             "nv_tensorrt_rtx"; any but "cpu" makes engine "auto" onnxruntime */
  int32_t device;         /* of these: the GPU's number, from 0 on, as CUDA counts them */
  int32_t allow_fallback; /* 1: what the provider does not run, the CPU does, and dlm_bundle_engine
                             says what that is; 0 (default): such nodes are refused by name, with
                             UNSUPPORTED */
} dlm_open_options;
DLM_API void dlm_open_options_init(dlm_open_options* options);
DLM_API void dlm_open_options_init_sized(dlm_open_options* options, size_t struct_size);
#define dlm_open_options_init(options) \
  dlm_open_options_init_sized(options, sizeof(dlm_open_options))

/* Engine "onnxruntime" takes kernels of this library where it is slow itself: the first of
 * "amx-int8", "avx512-vnni", "avx-vnni", "avx2" or "neon-dotprod" that the processor has.
 * $DLM_KERNELS names others that it has, or "none"; any other name is refused. dlm_bundle_engine
 * tells which they are. "amx-int8" asks the system for the process's use of AMX's registers when
 * kernels are first looked for: signal frames of threads that use them grow by 8 KiB. */
typedef struct dlm_kernel_set {
  const char* name;
  const char* refusal; /* why they do not run here; NULL: they do */
} dlm_kernel_set;

/* All that there are for this architecture, fastest first, counted from 0; NULL behind the last.
 * Static. */
DLM_API const dlm_kernel_set* dlm_kernel_set_at(size_t index);

/* ONNX Runtime's official builds store a device id and send telemetry, unless
 * $ORT_DISABLE_TELEMETRY is 1 before they start. Opening with engine "onnxruntime" sets it to 1
 * where it is not set. A program whose other threads read the environment at that time sets it
 * itself, before it starts them. */

/* A provider of GPUs wants ONNX Runtime 1.24 or newer, built with it (onnxruntime-gpu), and the
 * driver ($DLM_CUDA_LIBRARY). It runs the form of the graph that the bundle holds for GPUs, where
 * it holds one. A session keeps its keys and values on the device; of a pass, candidates come back,
 * and logits if they are asked for. */

/* Engine "tensorrt" is there if the library was compiled with TensorRT's headers. It runs on the
 * first CUDA device
 * ($CUDA_VISIBLE_DEVICES chooses), takes the engine of the bundle that was built for that device
 * and for exactly the TensorRT that it loads, and says of every other one why not. A session then
 * holds its buffers and its cache on the device. $DLM_CUDA_LIBRARY is the driver's library where
 * that is not libcuda.so.1. */

/* Opens the bundle in the folder `path`, checks it, and loads its engine. options may be NULL. On
 * failure the sentence goes to message (at most message_capacity bytes with its NUL; may be NULL).
 */
DLM_API dlm_status dlm_bundle_open(const char* path, const dlm_open_options* options, char* message,
                                   size_t message_capacity, dlm_bundle** bundle);

/* A bundle without files: `run` makes the passes. `user` must outlive the bundle; calls come from
 * the sessions' threads. kv_element_bytes is as `run` wants it. */
DLM_API dlm_status dlm_bundle_from_callback(const dlm_denoiser* denoiser, dlm_pass_fn run,
                                            void* user, char* message, size_t message_capacity,
                                            dlm_bundle** bundle);
DLM_API void dlm_bundle_destroy(dlm_bundle* bundle);

/* What the loop knows of the denoiser; eos_token_ids points into the bundle. kv_heads or head_size
 * is 0 where layers differ in it: loop.graph.ports.layers of the manifest has those of each. */
DLM_API void dlm_bundle_denoiser(const dlm_bundle* bundle, dlm_denoiser* denoiser);
DLM_API void dlm_bundle_denoiser_sized(const dlm_bundle* bundle, dlm_denoiser* denoiser,
                                       size_t struct_size);
#define dlm_bundle_denoiser(bundle, denoiser) \
  dlm_bundle_denoiser_sized(bundle, denoiser, sizeof(dlm_denoiser))

/* The text of manifest.json as it was checked; "" for a callback bundle. Owned by the bundle. */
DLM_API const char* dlm_bundle_manifest(const dlm_bundle* bundle);

/* The engine as one line for people, e.g. "onnxruntime 1.31.1 (CPU)". Owned by the bundle. */
DLM_API const char* dlm_bundle_engine(const dlm_bundle* bundle);

/* The max_new_tokens of a request that sets DLM_DEFAULT_NEW_TOKENS: loop.max_new_tokens of the
 * manifest, 128 by default. 0 for NULL. */
DLM_API int32_t dlm_bundle_max_new_tokens(const dlm_bundle* bundle);

/* Fills *policy, up to its struct_size, with a preset of the manifest; name NULL: the bundle's
 * default. policy->struct_size must be set (dlm_policy_init). DLM_NOT_FOUND lists the presets in
 * message. A callback bundle has no presets. */
DLM_API dlm_status dlm_bundle_preset(const dlm_bundle* bundle, const char* name, char* message,
                                     size_t message_capacity, dlm_policy* policy);

/* The same with an effort level: "instant", "low", "medium" or "high", fewest passes first, as they
 * were fitted on data for one of the presets. DLM_NOT_FOUND for another name, and for a bundle that
 * nobody fitted levels for: `dlm-export effort` does. */
DLM_API dlm_status dlm_bundle_effort(const dlm_bundle* bundle, const char* level, char* message,
                                     size_t message_capacity, dlm_policy* policy);

/* ---- Session
 * --------------------------------------------------------------------------------------------------------
 */

DLM_API dlm_status dlm_session_create(dlm_bundle* bundle, char* message, size_t message_capacity,
                                      dlm_session** session);
DLM_API void dlm_session_destroy(dlm_session* session);

/* The sentence of this session's last failure; "" if none. Valid until the next call on the
 * session. */
DLM_API const char* dlm_session_last_error(const dlm_session* session);

/* Called before every pass that a session makes, in whichever call, on the calling thread. Anything
 * but 0 ends that call with DLM_CANCELLED and drops its request; the session takes the next one. So
 * a signal or a deadline is seen within one pass. It may call what a dlm_step_fn may. */
typedef int32_t (*dlm_before_pass_fn)(void* user);

/* Until the next call of this, or the session's end; NULL, as at first: nobody is asked. */
DLM_API dlm_status dlm_session_before_pass(dlm_session* session, dlm_before_pass_fn before_pass,
                                           void* user);

/* What a request's text may be: an automaton over token ids, as a file that dlm-export's Python
 * side compiles of a JSON Schema or a regular expression for one vocabulary. Any number of sessions
 * and threads may share one. */
typedef struct dlm_automaton dlm_automaton;

/* Reads and checks one, from a file or from memory. On failure the sentence goes to message.
 * BAD_BUNDLE for a damaged file. */
DLM_API dlm_status dlm_automaton_open(const char* path, char* message, size_t message_capacity,
                                      dlm_automaton** automaton);
DLM_API dlm_status dlm_automaton_read(const void* data, size_t size, char* message,
                                      size_t message_capacity, dlm_automaton** automaton);
DLM_API void dlm_automaton_destroy(
    dlm_automaton* automaton); /* requests that began with it go on */

/* The tokens of its shortest text. */
DLM_API int32_t dlm_automaton_shortest(const dlm_automaton* automaton);

/* Of the requests that start from now on, until the next call of this; NULL, as at first: no
 * constraint. From its first undecided position to its last, a request then comes to a text that
 * the automaton accepts, whatever the policy and what ends it, with end tokens behind it where
 * there is room: the most likely one, or of "sample" a draw. INVALID_ARGUMENT where no text fits
 * there, UNSUPPORTED for another vocabulary. */
DLM_API dlm_status dlm_session_constrain(dlm_session* session, const dlm_automaton* automaton);

/* The same, and so many given tokens in front of the first undecided position are the first ones of
 * the text. They have to be as the tokenizer writes it: a text that starts inside a token, or in an
 * unusual one, is compiled into the automaton. */
DLM_API dlm_status dlm_session_constrain_from(dlm_session* session, const dlm_automaton* automaton,
                                              int32_t given);

/* The canvas after one step. Pointers are valid until the next call on the session. */
typedef struct dlm_step {
  const int32_t* canvas; /* [length] */
  const int32_t* guess;  /* [length], the token that a scored, still undecided position would take
                            now; -1 elsewhere */
  const float* score;    /* [length], its score; 0 elsewhere */
  int32_t length;
  int32_t block_start, block_end; /* the block being filled, [start, end) */
  int32_t nfe;                    /* passes so far */
  int32_t committed;              /* positions committed by this step */
  int32_t done; /* 1: every position is decided, or the request was ended: dlm_result */
} dlm_step;

/* Called after every step on the calling thread; anything but 0 ends the request with
 * DLM_CANCELLED. It may call dlm_session_stats, dlm_session_undecided and dlm_session_cancel on its
 * session; other calls on it return DLM_INVALID_ARGUMENT, and it must not destroy it. */
typedef int32_t (*dlm_step_fn)(void* user, const dlm_step* step);

/* A value of dlm_generate_options.max_new_tokens: use the bundle's own number,
 * dlm_bundle_max_new_tokens. */
#define DLM_DEFAULT_NEW_TOKENS (-1)

typedef struct dlm_generate_options {
  size_t struct_size;
  const dlm_policy* policy; /* NULL: the bundle's default preset (dlm_policy_init's policy for a
                               callback bundle) */
  int32_t max_new_tokens; /* how many mask tokens follow the given ones, 0 or more. 0: fill only the
                             mask tokens among the given ones. DLM_DEFAULT_NEW_TOKENS (the initial
                             value): the bundle's own number */
  int32_t steps; /* passes planned for the whole generation, split evenly over the blocks; 0: the
                    policy's */
  dlm_step_fn on_step; /* may be NULL */
  void* user;
  const dlm_policy* const* policies; /* of dlm_session_generate_batch: [request_count], one for
                                        each; NULL: `policy` for all */
  double deadline_ms; /* no pass starts later than this many milliseconds after the call
                         (dlm_session_start): the request ends with what it has,
                         DLM_FINISH_DEADLINE. 0: no deadline */
  int32_t max_steps; /* a request ends after this many passes with what it has, DLM_FINISH_STEPS; 0:
                        any number */
  int32_t special_tokens; /* of dlm_generate_text and dlm_generate_chat: 1: text of the prompt or of
                             a message that spells a special token, such as "<|eos|>", is that token
                             | 0: it is ordinary text */
} dlm_generate_options;
DLM_API void dlm_generate_options_init(dlm_generate_options* options);
DLM_API void dlm_generate_options_init_sized(dlm_generate_options* options, size_t struct_size);
#define dlm_generate_options_init(options) \
  dlm_generate_options_init_sized(options, sizeof(dlm_generate_options))

/* Where the time of a request went. The two kinds of passes are the engine's part; what the parts
 * leave of total_s is the loop's own bookkeeping. */
typedef struct dlm_stats {
  int32_t nfe;        /* passes made, counted */
  double prefill_s;   /* seconds in the passes that fill or refresh a cache */
  double passes_s;    /* seconds in all other passes */
  double selection_s; /* seconds of scoring, ranking and committing */
  double cache_s; /* seconds of moving keys and values between passes; a device may end its moves in
                     the next pass */
  double total_s; /* seconds from start to done, without the caller's own time */
  uint64_t cache_bytes; /* keys and values held for the request, at most; 0 without a cache */
} dlm_stats;

/* Fills the canvas and returns when every position is decided, or the request was ended
 * (dlm_result). tokens: the given ones on entry (mask tokens among them are undecided, as the new
 * ones are), the whole canvas on return; count: how many are given; capacity counts tokens and must
 * be at least count + max_new_tokens (with DLM_DEFAULT_NEW_TOKENS: count +
 * dlm_bundle_max_new_tokens). INVALID_ARGUMENT, tokens untouched, if an id is outside the
 * vocabulary or the canvas would be longer than the denoiser takes. stats may be NULL. */
DLM_API dlm_status dlm_session_generate(dlm_session* session, const dlm_generate_options* options,
                                        int32_t* tokens, size_t count, size_t capacity,
                                        dlm_stats* stats, size_t* length);

/* One of several requests. An array holds them, so there is no struct_size: its fields change with
 * DLM_ABI_VERSION. */
typedef struct dlm_request {
  int32_t* tokens; /* as of dlm_session_generate */
  size_t count;    /* given ones */
  size_t capacity; /* tokens that fit */
  size_t length;   /* set: of the canvas; 0 on failure */
  int32_t nfe;     /* set: passes that committed to it; 0 on failure */
} dlm_request;

/* Several requests at once, each with options->max_new_tokens behind its tokens. Those that fit
 * together share their passes, at most max_batch of them (1..4096), which shares the reading of
 * weights: canvases of one length and, over a cache, masks in the same blocks; never with store
 * "reuse". The others run one batch after the other. Over a cache a request that has finished a
 * block waits for the slowest of its batch. Each gets what it gets alone, but for floating-point
 * noise of the engine. Errors name a request by its number, counted from 0, and leave the tokens of
 * all untouched. options->on_step must be NULL. stats, which may be NULL, are sums over the
 * batches, their nfe passes made; cache_bytes is the largest. Drops a running request. UNSUPPORTED
 * where the engine takes fewer at a time: "tensorrt" takes one. */
DLM_API dlm_status dlm_session_generate_batch(dlm_session* session,
                                              const dlm_generate_options* options,
                                              dlm_request* requests, size_t request_count,
                                              int32_t max_batch, dlm_stats* stats);

/* Why a request ended. */
enum {
  DLM_FINISH_NONE = 0,      /* it runs */
  DLM_FINISH_STOP = 1,      /* all is decided, by an end token */
  DLM_FINISH_LENGTH = 2,    /* all is decided, without one */
  DLM_FINISH_STEPS = 3,     /* max_steps passes were made */
  DLM_FINISH_DEADLINE = 4,  /* deadline_ms went by */
  DLM_FINISH_CANCELLED = 5, /* dlm_session_cancel */
  DLM_FINISH_CONSTRAINT =
      6 /* all is decided, without an end token, and the text of its constraint is whole */
};

/* What a request came to, beside its canvas. One that ended before all was decided has a whole
 * canvas too: what its last pass scored holds what that proposed, and the rest the first end token,
 * or the mask token where the denoiser has none; what the text of a constraint still wants stands
 * before the end tokens. `undecided` tells it from what was committed. */
typedef struct dlm_result {
  size_t struct_size;
  int32_t finish;            /* DLM_FINISH_...; newer libraries may add values */
  int32_t nfe;               /* passes that the request took part in */
  int32_t prompt_tokens;     /* given ones */
  int32_t completion_tokens; /* the others, up to their first end token, which is none */
  const float* log_probs;    /* [length], ln p of a committed token, by the softmax of the pass that
                                committed it, the mask token excluded; NaN at all other positions.
                                Never infinite: a probability that rounds to 0 gives ln of the smallest
                                positive double, -744.44 */
  const uint8_t* undecided;  /* [length], 1: the request ended before a token was decided there */
  size_t length;             /* of the canvas */
  double constraint_log_prob_loss; /* nats, 0 or more: how much less likely the constraint made the
                                text. The sum over positions of ln p of the denoiser's best token
                                minus ln p of the committed one, by the last pass that scored the
                                position; at most 745 a position. Positions that were filled before
                                a pass scored them count 0. 0 without a constraint. */
} dlm_result;

/* Of the requests that ended last, by number: 0, but for dlm_session_generate_batch. Pointers are
 * valid until the next call that starts one. struct_size need not be set. INVALID_ARGUMENT where no
 * such request has ended. */
DLM_API dlm_status dlm_session_result_sized(dlm_session* session, size_t request,
                                            dlm_result* result, size_t struct_size);
#define dlm_session_result(session, request, result) \
  dlm_session_result_sized(session, request, result, sizeof(dlm_result))

/* Ends a request of the call that runs, or that was started, within one pass, with what it has: the
 * call returns DLM_OK, and dlm_result says DLM_FINISH_CANCELLED. request: its number, or
 * DLM_ALL_REQUESTS. From any thread, also from callbacks; nothing where no such request runs. The
 * session must not be destroyed meanwhile. */
#define DLM_ALL_REQUESTS SIZE_MAX
DLM_API void dlm_session_cancel(dlm_session* session, size_t request);

/* dlm_session_generate a step at a time: start once, then step until step->done. Starting again
 * drops the running request. */
DLM_API dlm_status dlm_session_start(dlm_session* session, const dlm_generate_options* options,
                                     const int32_t* tokens, size_t count);
DLM_API dlm_status dlm_session_step(dlm_session* session, dlm_step* step);
DLM_API void dlm_session_stats(const dlm_session* session, dlm_stats* stats);

/* The passes of dlm_stats.nfe, told apart. */
typedef struct dlm_pass_counts {
  size_t struct_size;
  int32_t prefill; /* that fill or refresh a cache: what is given, or of "prefix" and "dual" a
                      block's first pass */
  int32_t denoise; /* all others */
  int32_t store;   /* of "block": over what is finished, which they store */
} dlm_pass_counts;

/* Of the request that runs, or that ran last; of dlm_session_generate_batch the sum. struct_size
 * need not be set. */
DLM_API void dlm_session_pass_counts_sized(const dlm_session* session, dlm_pass_counts* counts,
                                           size_t struct_size);
#define dlm_session_pass_counts(session, counts) \
  dlm_session_pass_counts_sized(session, counts, sizeof(dlm_pass_counts))

/* Which positions of the request that runs, or ran last, are still undecided: [length], 1 for
 * those, 0 for the given and the committed ones. What the canvas holds at an undecided position is
 * what the denoiser sees there. Valid until the next call on the session; NULL and 0 where no
 * request was started. length may be NULL. */
DLM_API const uint8_t* dlm_session_undecided(const dlm_session* session, size_t* length);

/* One full pass over tokens [count] (masks stay masked): raw logits of the given rows, [row_count,
 * V], into logits, whose capacity counts floats. Rows are not shifted. Drops a running request. */
DLM_API dlm_status dlm_session_logits(dlm_session* session, const int32_t* tokens, size_t count,
                                      const int32_t* rows, size_t row_count, float* logits,
                                      size_t capacity);

/* For measuring: the seconds [repeats] that the engine takes for a pass of `batch` requests, each
 * with `tokens` over `cached` ones and `rows` of them scored, made `repeats` times on made-up
 * tokens (0: only checked). For cached > 0 a full pass fills the cache first, untimed. Drops a
 * running request. INVALID_ARGUMENT if the denoiser or the engine takes no such pass, UNSUPPORTED
 * for cached > 0 where the denoiser has no cache, and for a batch that the engine does not take. */
DLM_API dlm_status dlm_session_time_passes(dlm_session* session, int32_t batch, int32_t tokens,
                                           int32_t cached, int32_t rows, double* seconds,
                                           size_t repeats);

/* ---- Scheduler
 * ------------------------------------------------------------------------------------------------------
 */

/* Requests that any number of threads hand in, and one thread makes the passes of, whatever their
 * prompts, lengths, policies, seeds, blocks and constraints. Where the engine lets them
 * ("onnxruntime" on a CPU) all that run share every pass: a request that is done leaves, and one
 * that waits joins, between two passes. With other engines they take turns, pass by pass. Each gets
 * what it gets alone, but for floating-point noise of the engine. Requests begin in the order of
 * their coming; a pass takes those first that have waited for one longest. */
typedef struct dlm_scheduler dlm_scheduler;
typedef struct dlm_job dlm_job;

/* Milliseconds that a pass takes whatever it computes, and for each token, each scored row and each
 * pair of a token and a position that it sees: `dlm-export bench --cost` fits them to what it
 * measures on a machine. All 0: unknown. */
typedef struct dlm_pass_cost {
  double pass_ms, token_ms, row_ms, pair_ms;
} dlm_pass_cost;

typedef struct dlm_scheduler_options {
  size_t struct_size;
  int32_t max_running; /* requests that have begun (16), 1..4096 */
  int32_t max_waiting; /* requests that have not (1024): more are refused with DLM_BUSY */
  int32_t
      max_tokens; /* of a pass that several share (512): those for whom there is no room take part
                     in the next. A request whose pass has more of its own makes it alone */
  uint64_t
      cache_bytes; /* keys and values of all that run: a request begins when there is room for its
                      canvas's. 0: 1 GiB, or what the longest canvas takes if that is more */
  double max_pass_ms; /* that a pass which several share is expected to take (0: any time). A
                         request begins when a pass over the blocks of all that run and its own is
                         expected to stay within it, or when none runs */
  dlm_pass_cost cost; /* by which it is expected, times what the last passes took of that where it
                         was more; expected_s of dlm_scheduler_stats counts by it alone */
} dlm_scheduler_options;
DLM_API void dlm_scheduler_options_init_sized(dlm_scheduler_options* options, size_t struct_size);
#define dlm_scheduler_options_init(options) \
  dlm_scheduler_options_init_sized(options, sizeof(dlm_scheduler_options))

/* options may be NULL. INVALID_ARGUMENT for max_pass_ms without a cost; UNSUPPORTED for it where
 * requests take turns. */
DLM_API dlm_status dlm_scheduler_create(dlm_bundle* bundle, const dlm_scheduler_options* options,
                                        char* message, size_t message_capacity,
                                        dlm_scheduler** scheduler);

/* Nobody may be running it. Requests that are not done end as cancelled ones; their jobs stay. */
DLM_API void dlm_scheduler_destroy(dlm_scheduler* scheduler);

/* Hands a request in, from any thread; tokens [count] and options are as of dlm_session_start, and
 * the deadline counts from now. on_step is called on the thread that makes the passes, until the
 * request is done, also where its job was destroyed before: `user` lives that long. It must neither
 * wait for a job nor run or destroy the scheduler; anything but 0 ends its request with
 * DLM_CANCELLED. automaton and given are as of dlm_session_constrain_from; NULL and 0: no
 * constraint. BUSY as above; INVALID_ARGUMENT too for a canvas whose keys and values never fit.
 * After a call of dlm_scheduler_run that failed, it returns the status of that call until the next
 * one. */
DLM_API dlm_status dlm_scheduler_submit(dlm_scheduler* scheduler,
                                        const dlm_generate_options* options,
                                        const dlm_automaton* automaton, int32_t given,
                                        const int32_t* tokens, size_t count, char* message,
                                        size_t message_capacity, dlm_job** job);

/* Makes passes on the calling thread until dlm_scheduler_stop or, if until_idle is 1, until no
 * request is left. before_pass may be NULL and is as of dlm_session_before_pass. If it returns
 * anything but 0, this call ends with DLM_CANCELLED, and the next call goes on.
 *
 * If one request fails, it fails alone, and its job has the reason: this includes errors as it
 * ends, such as a constraint without a text. If making passes itself fails (no memory, an exception
 * from before_pass), every request that is not done ends with the status and message that this call
 * returns, so nobody waits for it. The scheduler can be run again. INVALID_ARGUMENT if another
 * thread is in this call. */
DLM_API dlm_status dlm_scheduler_run(dlm_scheduler* scheduler, int32_t until_idle,
                                     dlm_before_pass_fn before_pass, void* user, char* message,
                                     size_t message_capacity);

/* Ends the call of dlm_scheduler_run after the pass that is being made, or the next call at once.
 * From any thread. */
DLM_API void dlm_scheduler_stop(dlm_scheduler* scheduler);

typedef struct dlm_scheduler_stats {
  size_t struct_size;
  int32_t waiting, running;             /* requests now */
  int64_t submitted, finished, refused; /* requests so far, refused by DLM_BUSY */
  int64_t passes;                       /* made */
  int64_t shares;                       /* sum of the requests that took part in each */
  double busy_s;                        /* seconds in passes and commits */
  uint64_t cache_bytes;                 /* keys and values held at once, at most */
  double passes_s;                      /* seconds in passes alone */
  double expected_s; /* that these were expected to take; 0 without a cost, or where requests take
                        turns */
} dlm_scheduler_stats;

/* From any thread. struct_size need not be set. */
DLM_API void dlm_scheduler_stats_sized(const dlm_scheduler* scheduler, dlm_scheduler_stats* stats,
                                       size_t struct_size);
#define dlm_scheduler_get_stats(scheduler, stats) \
  dlm_scheduler_stats_sized(scheduler, stats, sizeof(dlm_scheduler_stats))

/* Waits until the request is done; timeout_ms < 0: as long as it takes. 1: it is. */
DLM_API int32_t dlm_job_wait(const dlm_job* job, double timeout_ms);

/* The canvas of a request that is done, until its job is destroyed; NULL and 0 before. length may
 * be NULL. */
DLM_API const int32_t* dlm_job_tokens(const dlm_job* job, size_t* length);

/* How it ended: DLM_OK with its result, or why it failed; INVALID_ARGUMENT before it is done.
 * Pointers of the result are valid until the job is destroyed. result may be NULL, and its
 * struct_size need not be set. */
DLM_API dlm_status dlm_job_result_sized(const dlm_job* job, dlm_result* result, size_t struct_size);
#define dlm_job_result(job, result) dlm_job_result_sized(job, result, sizeof(dlm_result))

/* The sentence of a request that failed; "" of any other. Owned by the job. */
DLM_API const char* dlm_job_message(const dlm_job* job);

/* Ends it within one pass with what it has, DLM_FINISH_CANCELLED. From any thread, also from
 * callbacks. */
DLM_API void dlm_job_cancel(dlm_job* job);

/* Cancels it too, where it is not done: the pass that is being made may still call its on_step.
 * Where that matters, dlm_job_cancel and dlm_job_wait come before. It may outlive its scheduler. */
DLM_API void dlm_job_destroy(dlm_job* job);

/* ---- Text
 * ------------------------------------------------------------------------------------------------------------
 */

/* A bundle's tokenizer and chat template, compiled into a file of the bundle when that was built,
 * where they came out equal to Python's: token ids are those of the tokenizers library, chats those
 * of Jinja. Nothing in it is run. Any number of threads may share one. Text is UTF-8 with its size
 * in bytes and may hold NUL; what is no UTF-8 is refused with INVALID_ARGUMENT. */
typedef struct dlm_text dlm_text;

/* The bundle's own, read when it is first asked for; it lives as long as the bundle. UNSUPPORTED,
 * with the reason in message, where the bundle has none. */
DLM_API dlm_status dlm_bundle_text(dlm_bundle* bundle, char* message, size_t message_capacity,
                                   const dlm_text** text);

/* Such a file by itself, from memory. BAD_BUNDLE for a damaged one. */
DLM_API dlm_status dlm_text_read(const void* data, size_t size, char* message,
                                 size_t message_capacity, dlm_text** text);
DLM_API void dlm_text_destroy(dlm_text* text); /* not for a bundle's own */

/* Flags of dlm_text_encode and dlm_chat_encode. */
enum {
  DLM_ENCODE_PROMPT = 1, /* add the tokens that the tokenizer puts around a prompt; without it, the
                            text alone is encoded */
  DLM_ENCODE_SPECIAL = 2 /* text that spells a special token, such as "<|eos|>", is that token;
                            without it, it is ordinary text */
};

/* Token ids of a text. flags: DLM_ENCODE_ values, added. count: the number of ids. If it is more
 * than `capacity`, only the first `capacity` are written, so a first call may pass 0.
 * INVALID_ARGUMENT for text that gives a special token without DLM_ENCODE_SPECIAL, which only a
 * vocabulary can that has the token's text as an ordinary word. */
DLM_API dlm_status dlm_text_encode(const dlm_text* text, const char* string, size_t size,
                                   int32_t flags, char* message, size_t message_capacity,
                                   int32_t* tokens, size_t capacity, size_t* count);

/* The text of token ids, special ones left out, as whole characters: U+FFFD stands for bytes that
 * are none. size: its bytes; where capacity is smaller, the first `capacity` are written, without a
 * NUL behind them. */
DLM_API dlm_status dlm_text_decode(const dlm_text* text, const int32_t* tokens, size_t count,
                                   char* message, size_t message_capacity, char* string,
                                   size_t capacity, size_t* size);

/* dlm_text_decode for ids that come piece by piece. One decoder is of one text and belongs to one
 * thread at a time; it may outlive what it was made of. */
typedef struct dlm_decoder dlm_decoder;
DLM_API dlm_status dlm_decoder_create(const dlm_text* text, char* message, size_t message_capacity,
                                      dlm_decoder** decoder);
DLM_API void dlm_decoder_destroy(dlm_decoder* decoder);

/* What further ids add to the text, whole characters alone: string, of `size` bytes and a NUL, is
 * the decoder's until the next call on it. is_last: 1: no others will come, so that what was held
 * back comes too. */
DLM_API dlm_status dlm_decoder_push(dlm_decoder* decoder, const int32_t* tokens, size_t count,
                                    int32_t is_last, const char** string, size_t* size);

/* A message of a chat. An array holds them, so there is no struct_size: its fields change with
 * DLM_ABI_VERSION. */
typedef struct dlm_message {
  const char*
      role; /* "system", "user", "assistant", "tool": those of the template; NUL-terminated */
  const char* content;
  size_t content_size; /* bytes */
} dlm_message;

/* A chat as text, up to where the assistant answers. size and capacity are those of
 * dlm_text_decode. UNSUPPORTED, with the message's number and the reason, where the template does
 * more with it than to put contents between fixed texts. */
DLM_API dlm_status dlm_chat_render(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, char* message, size_t message_capacity,
                                   char* string, size_t capacity, size_t* size);

/* Token ids of a chat, up to where the assistant answers. The template's special tokens are special
 * tokens; those that a message's content spells are ordinary text. Prefer it to encoding the text
 * of dlm_chat_render, in which both look the same. flags: 0 or DLM_ENCODE_SPECIAL; count and
 * capacity are those of dlm_text_encode. */
DLM_API dlm_status dlm_chat_encode(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, int32_t flags, char* message,
                                   size_t message_capacity, int32_t* tokens, size_t capacity,
                                   size_t* count);

/* Told what a step adds to the text: `delta`, of `size` bytes and a NUL, whole characters in front
 * of what is still undecided. On the calling thread; anything but 0 ends the request with
 * DLM_CANCELLED. It may call what a dlm_step_fn may. */
typedef int32_t (*dlm_text_fn)(void* user, const char* delta, size_t size);

/* dlm_session_generate from text to text. on_text may be NULL, and options->on_step too. text: what
 * was generated, up to the first end token; `size` bytes and a NUL, the session's until the next
 * call of these two. dlm_session_result tells the rest. */
DLM_API dlm_status dlm_generate_text(dlm_session* session, const dlm_generate_options* options,
                                     const char* prompt, size_t prompt_size, dlm_text_fn on_text,
                                     void* user, const char** text, size_t* size);
DLM_API dlm_status dlm_generate_chat(dlm_session* session, const dlm_generate_options* options,
                                     const dlm_message* messages, size_t message_count,
                                     dlm_text_fn on_text, void* user, const char** text,
                                     size_t* size);

#ifdef __cplusplus
}
#endif
#endif /* DLM_RUNTIME_H */
