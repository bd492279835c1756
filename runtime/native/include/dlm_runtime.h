/* dlm_runtime.h: the C ABI of libdlm_runtime, the native runtime of dlm-export.
 *
 * The library opens a bundle, which is a folder that `dlm-export build` wrote. It then uses the
 * bundle's denoiser to fill the mask tokens of a canvas, which is an array of token ids:
 *
 *   dlm_bundle_open -> dlm_session_create -> dlm_session_generate -> read dlm_result
 *
 * A request (dlm_request) describes a canvas and how to fill its mask tokens. There are two ways
 * to run requests. A session runs requests on the caller's thread. A scheduler (dlm_scheduler)
 * accepts requests from any thread, and one thread of the program runs them. A session and a
 * scheduler return the same results (dlm_result).
 *
 * Conventions
 * - A function that can fail returns dlm_status. If such a function has a result, its last argument
 *   is the address where it writes the result. If the call fails, it writes NULL or 0 to this
 *   address. In a comment, "NOT_FOUND if the file is missing" means that the call returns
 *   DLM_NOT_FOUND if the file is missing.
 * - The caller must destroy each object that it creates. Destroying NULL does nothing. The library
 *   uses the caller's pointers only during the call, unless the comment of a function or field says
 *   otherwise.
 * - If later versions may add fields to a struct, the struct starts with struct_size. New fields
 *   are added only at the end of the struct.
 * - To fill a struct, first call its _init function with sizeof(struct), and then change fields.
 *   The default of each field is in parentheses or marked "default". If struct_size is larger than
 *   the struct in the library's version, the call fails with INVALID_ARGUMENT, because the library
 *   would ignore the last fields.
 * - Some structs are filled and owned by the library, which returns a pointer to the struct. The
 *   caller may read only the first struct_size bytes of such a struct.
 * - A call fails with INVALID_ARGUMENT if a number is outside its range. A range such as 1..8
 *   includes both ends.
 * - New versions may add values to enumerations such as DLM_FINISH_... and DLM_TEXT_.... The
 *   library rejects values that it does not know. Programs should accept values that they do not
 *   know.
 * - Any number of threads may use a bundle or a scheduler at the same time. Only one thread at a
 *   time may use a session or a job. As an exception, any thread may call dlm_session_cancel and
 *   dlm_job_cancel at any time. A bundle must outlive its sessions and schedulers.
 * - The library prints nothing, keeps no global state, never calls exit, and throws no exception.
 *   dlm_open_options.on_log receives log lines, most of them from the engine's library.
 * - Text is UTF-8. A text that is passed without its size must end with a NUL. Token ids are
 *   int32. */
#ifndef DLM_RUNTIME_H
#define DLM_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLM_API __attribute__((visibility("default")))

/* DLM_ABI_VERSION increases when a change of the ABI breaks compiled programs. It does not increase
 * when a function is added, or when a field is added at the end of a struct with struct_size. */
#define DLM_ABI_VERSION 1
DLM_API uint32_t dlm_abi_version(void); /* returns the DLM_ABI_VERSION of the loaded library */
DLM_API const char* dlm_version(void);  /* returns a static string, for example "0.1.0" */

typedef int32_t dlm_status;
enum {
  DLM_OK = 0,
  DLM_INVALID_ARGUMENT = 1, /* the request is invalid, for example an id outside the vocabulary */
  DLM_NOT_FOUND = 2,        /* a bundle, a file of the bundle, or a preset does not exist */
  DLM_BAD_BUNDLE = 3,       /* the bundle is damaged, or has a version that this library does not
                               know */
  DLM_UNSUPPORTED = 4,      /* the request is valid, but this library or the bundle's denoiser
                               does not support it */
  DLM_ENGINE_FAILED = 5,    /* the engine reported an error, or returned results that are not
                               finite */
  DLM_OUT_OF_MEMORY = 6,    /* the host or the device has run out of memory */
  DLM_CANCELLED = 7,        /* a callback of the program ended the request */
  DLM_INTERNAL = 8,         /* a defect of this library; please report it with the error message */
  DLM_ENGINE_MISSING = 9,   /* the engine's library is missing, too old, or cannot be loaded */
  DLM_BUSY = 10             /* the scheduler's queue of requests is full; submit the request again
                               later */
};
DLM_API const char* dlm_status_name(dlm_status status); /* returns a static string, never NULL */

/* ---- Denoisers and passes -------------------------------------------------------------------- */

/* The properties of a denoiser that the decoding loop needs. The comments in this header use
 * these letters for sizes of arrays: B requests in a pass, T tokens that the pass computes for
 * each request, S cached tokens of each request, R scored rows of each request (rows for which
 * the pass predicts tokens), V tokens in the vocabulary, K candidates per row, and C numbers of
 * self-conditioning per row. */
typedef struct dlm_denoiser {
  size_t struct_size;
  int32_t vocab_size;        /* V, 3..16777216 */
  int32_t mask_token_id;     /* 0..V. If it is V, the denoiser has no mask token and starts from
                                random tokens. This requires draft passes, and a policy with remask
                                "noise" */
  int32_t max_canvas_length; /* tokens, 1..16777216 */
  int32_t layers;            /* 1..1024 */
  int32_t kv_heads;          /* number of key and value heads in every layer, 1..4096. If a bundle
                                on disk has layers with different numbers of heads: 0 */
  int32_t head_size;         /* size of a head in every layer, 1..4096. If a bundle on disk has
                                layers with different head sizes: 0 */
  int32_t top_k; /* K, the number of candidates that a pass returns per row, 2..64, less than V */
  int32_t kv_element_bytes; /* size in bytes of each number in the cached keys and values: 4 for
                               fp32, 2 for fp16 or bf16, 1 for int8. With int8, each row also
                               stores a scale of 2 bytes */
  int32_t shift;            /* 1 if the row of position i predicts position i + 1; 0 if the row
                               predicts position i */
  int32_t has_cache;        /* 1 if passes can read and write cached keys and values; 0 if not */
  const int32_t* eos_token_ids; /* [eos_count], ids of the end tokens, 0..V-1. The mask token
                                   must not be one of them */
  size_t eos_count;             /* 0..1024; 0 only if eos_token_ids is NULL */
  int64_t visible_block;        /* 0..16777216. If it is 0, attention is full: every row sees all
                                   positions. If it is n > 0, attention is block-causal: position 0
                                   starts the first block of n positions, and a row does not see
                                   later blocks. See also blocks_after_prompt */
  int32_t max_new_tokens;       /* length of the answers that the denoiser was trained on, in
                                   tokens; 1..16777216 (128). With full attention, a canvas starts
                                   with this many mask tokens after the given tokens, see
                                   dlm_request. Also the default of a request's max_new_tokens */
  int64_t draft_block; /* 0..16777216. If draft_block is n > 0, the denoiser has draft passes: each
                          row of a draft pass sees all rows of the pass and predicts its own
                          position. In all other passes, a row sees no later positions and predicts
                          the next position. n is the number of rows that draft passes had during
                          training. draft_block needs visible_block 1 and a cache.
                          With shift 1, the denoiser is autoregressive: in all passes, a row sees
                          no later positions and predicts the next position. A pass may end with
                          draft rows, which contain mask tokens, or random tokens if mask_token_id
                          is V. Policies need commit "verify". shifted_drafts describes another kind
                          of draft passes with shift 1 */
  int64_t conditioning_size; /* C, 0..65536. If C > 0, the denoiser has self-conditioning: a draft
                                pass returns C numbers for each scored row, and the next draft pass
                                over the same block reads them. In this case, mask_token_id must be
                                V */
  /* Tokens that change the length of a canvas, 0..V-1, or -1 (default) for both. If a pass commits
   * expand_token_id, two mask tokens replace it. If a pass commits delete_token_id, it is removed.
   * Attention must be full. */
  int32_t expand_token_id;
  int32_t delete_token_id;
  int32_t shifted_drafts;      /* 1: in a draft pass, each draft row sees all rows of the pass and
                                  predicts the next position. The first draft row is the last decided
                                  token, and the others are mask tokens. Rows before it may be causal.
                                  Needs draft_block, shift 1 and a mask token. Policies need commit
                                  "longest_prefix". 0 (default): see draft_block */
  int32_t blocks_after_prompt; /* 1: the positions before the first undecided one, the prompt, form
                                  one block, and the first block of visible_block positions starts
                                  after it. In block n after the prompt, n * max_canvas_length is
                                  added to position_ids. Needs visible_block above 0, and
                                  draft_block 0. 0 (default): see visible_block */
  int32_t split_token_id; /* 0..V-1, or -1 (default). With it, passes rewrite the current block: a
                             predicted split_token_id inserts a mask token before its position, and
                             a predicted delete_token_id removes its position. Needs block-causal
                             attention, shift 0, delete_token_id, and no expand_token_id. Policies
                             need remask "rewrite" */
} dlm_denoiser;
DLM_API void dlm_denoiser_init(dlm_denoiser* denoiser, size_t struct_size);

/* One pass of the denoiser over B independent canvases. The pass computes the same positions in
 * all canvases. The engine reads the const arrays and writes the other arrays. In each layer,
 * keys and values are arrays of the shape [B, kv_heads, rows, head_size]. `rows` is S for past
 * keys and values, and T for present keys and values. Keys already contain the position
 * encoding. */
typedef struct dlm_pass {
  size_t struct_size;
  int32_t batch;               /* B; above 1 only with guidance, or if several requests share the
                                  pass */
  int32_t tokens;              /* T */
  int32_t cached;              /* S */
  int32_t rows;                /* R */
  int32_t layers;              /* number of layers, and length of past_keys, past_values,
                                  present_keys and present_values */
  const int64_t* input_ids;    /* [B, T] */
  const int64_t* position_ids; /* [B, T], positions in the canvas; in a draft pass,
                                  max_canvas_length is added to the positions. With shift 1, it is
                                  added to the positions of draft rows */
  const int64_t* score_rows;   /* [B, R], 0..T-1: the rows to score */
  const void *const *past_keys, *const *past_values;
  void *const *present_keys, *const *present_values; /* NULL if the pass stores no rows */
  int32_t* top_tokens; /* [B, R, K], the ids of the most likely tokens, most likely first. If two
                          tokens are equally likely, the lower id comes first. The mask token is
                          never one of them */
  float* top_probs;    /* [B, R, K], the probabilities of top_tokens, computed by softmax in fp32
                          over all tokens except the mask token */
  float* entropy;      /* [B, R], the sum of p ln(p + 1e-10) over all tokens except the mask token,
                          0 or less; NULL if the caller does not need the sums */
  float* logits;       /* [B, R, V], raw logits; NULL if the caller does not need them. A logit must
                          be finite, or -infinity for a token that is ruled out. The logit of the
                          mask token is ignored. If any other logit is NaN or +infinity, the request
                          ends with ENGINE_FAILED */
  /* The following arrays are NULL if the denoiser has no self-conditioning. */
  const float* conditioning; /* [B, T, C]: next_conditioning of the last pass over the same block;
                                0 in the first pass over a block, and for rows of causal passes */
  const float* temperature;  /* [B, R], above 0: the temperature of each scored row, for
                                next_conditioning only */
  float* next_conditioning; /* [B, R, C], computed from the softmax of logits / temperature; NULL if
                               the caller does not need it */
  float* top_log_odds;      /* [B, R, K], optional: ln(p / (1 - p)) for the probabilities p of
                               top_tokens. Where the best logit leads by more than 15, top_probs is
                               exactly 1 in fp32, and only these numbers rank positions. Compute them
                               from the logits, and not from top_probs: l - ln(sum of exp(l') over all
                               other tokens). The array contains NaN when the callback is called; for
                               numbers that stay NaN, the library uses top_probs */
} dlm_pass;

/* Runs one pass. If the function returns a status other than DLM_OK, the requests of the pass end
 * with this status. */
typedef dlm_status (*dlm_pass_fn)(void* user, const dlm_pass* pass);

/* ---- Policy ---------------------------------------------------------------------------------- */

/* A policy decides which tokens are committed after each pass. dlm_bundle_policy sets all fields to
 * a preset of the bundle, and the caller may then change fields. Some fields are strings, so that a
 * policy looks the same in C, in Python and in manifest.json. The library does not copy these
 * strings, so use literals or strings that the bundle owns. */
typedef struct dlm_policy {
  size_t struct_size;
  const char* select;  /* "argmax" (default): take the most likely token | "sample": draw a token
                          at random, at `temperature` */
  const char* score;   /* how positions are scored: "confidence" (default) | "margin" | "entropy"
                          | "random" */
  const char* commit;  /* the rule that chooses which positions commit: "static" (default) |
                          "threshold" | "dynamic" | "factor" | "entropy_bound" | "timestep" |
                          "sequential" | "entropy_threshold" | "longest_prefix": the leftmost
                          positions commit, up to the first one whose score does not reach the
                          threshold | "verify": for denoisers with draft
                          passes. A draft pass predicts the tokens of a block, and a causal pass
                          verifies them. With shift 1, the causal pass also drafts the next block.
                          Causal passes alone, which decide one token per pass, would give the same
                          text. "verify" needs cache "block" and select "argmax". It
                          cannot be combined with guidance, sub-blocks, given tokens after the first
                          undecided position, steps_per_block or dlm_request.steps */
  const char* compare; /* ">=" (default) | ">": how a score is compared with the threshold */
  const char* remask;  /* "none" (default) | "edit": each pass may also replace tokens of its block
                          that earlier passes decided, and more such passes run when all positions
                          of the block are decided; see edit_threshold |
                          "noise": a block starts from random tokens instead of mask tokens. Each
                          pass predicts all positions of the block. For the next pass, the positions
                          that `commit` chooses get their predicted tokens, and all others get new
                          random tokens. The last pass decides the block: each position gets its
                          most likely token or, with a constraint, its token in the most likely
                          text. "noise" needs commit "entropy_bound", "threshold" or "factor", and
                          cache "block" or "none". It cannot be combined with guidance, sub-blocks
                          or reserve "end" |
                          "rewrite": for denoisers with a split_token_id. Each pass may also
                          replace, delete and insert tokens of its block, whose length stays the
                          same. The last pass decides the block. "rewrite" needs score "confidence"
                          and cache "block" or "none". It cannot be combined with constraints,
                          sub-blocks, reserve "end" or given tokens after the first undecided
                          position */
  const char* cache; /* which keys and values passes reuse: "none" (default) | "prefix", "dual": for
                        full attention | "block", "block-dual": for block-causal attention. With
                        "block-dual", some passes run only a sub-block */
  const char* stop;  /* "eos" (default): if a finished block contains an end token, later
                        blocks are not generated | "early-eos": the request ends as soon as an end
                        token and all positions before it are decided, so the rest of its block is
                        not generated either | "none": all blocks are generated */
  int32_t block_length;    /* length of a block in tokens, 0..16777216 (32). 0: all new tokens
                              are one block. With block-causal attention, the first block starts
                              at position 0, unless blocks_after_prompt is set, and block_length
                              must be a multiple of visible_block. Then the value 0 means
                              visible_block. If the
                              denoiser has draft passes, the first block starts at the first
                              undecided position, and the value 0 means draft_block */
  int32_t steps_per_block; /* planned number of passes for each block, 0..16777216. 0 (default):
                              one pass per token */
  int32_t refresh;         /* for cache "prefix" and "dual": a number of tokens, 0..16777216. 0
                              (default): the first pass over each block runs the whole canvas.
                              Otherwise, only the first pass over the first block runs the whole
                              canvas. The first pass over a later block starts `refresh` tokens
                              before this block, or at the start of the previous block if that is
                              earlier. It ends where the other passes over the block end */
  double threshold;        /* for commit "threshold", "dynamic" and "longest_prefix": positions
                              commit if their score is at least this number, or, with compare ">",
                              above it; 0..1 (0.9) */
  double factor;           /* for commit "factor": a higher factor commits more positions per
                              pass, 0..1e9 (1) */
  double entropy_bound;    /* for commit "entropy_bound": a higher bound commits more positions per
                              pass; in nats, 0..1e9 (0.1). For commit "entropy_threshold": positions
                              commit if their entropy is at most this number, or, with compare ">",
                              below it */
  double timestep_eps;     /* for commit "timestep": the last time step of the schedule, 1e-9..1
                              (1e-3) */
  double temperature; /* the logits are divided by this number. For select "sample": above 0, up to
                         1e300. For select "argmax": 0 (default) */
  uint64_t seed; /* seed for score "random" and select "sample" (0). The same seed gives the same
                    text with every engine, number of threads and batch size, unless rounding
                    differences between engines change the text */
  const char* store;        /* for cache "block": how the keys and values of a finished block are
                               stored. "pass" (default): one more pass over the block stores
                               exact rows | "open": like "pass", but the additional pass also
                               runs the next block, and commits tokens there; the final canvas is
                               the same as with "pass" | "reuse": the rows of the block's last
                               pass are stored, although some tokens of the block were still
                               masked in that pass */
  int32_t sub_block_length; /* for block-causal attention, 0..16777216: length of a sub-block in
                               tokens. Each block is divided into sub-blocks, which are decided one
                               after another. block_length must be a multiple of sub_block_length. 0
                               (default): no sub-blocks */
  int32_t edit_passes;   /* for remask "edit" and "rewrite": largest number of passes over a block
                            when none of its first mask tokens is left, 0..16777216 (16). The block
                            ends earlier if such a pass changes nothing */
  double edit_threshold; /* for remask "edit" and "rewrite", 0..1 (0.9). A token that is not a mask
                            token is replaced if a pass proposes another token whose probability is
                            above edit_threshold */
  double top_p;  /* for select "sample", 0..1 (1). The token is drawn from the n most likely tokens.
                    n is the smallest number of tokens whose probabilities add up to more than
                    top_p */
  int32_t top_k; /* for select "sample", 0..16777216. The token is drawn from the top_k most likely
                    tokens. 0 (default): the token is drawn from all tokens */
  const char* score_of; /* the distribution from which scores are computed. "prediction" (default):
                           the denoiser's softmax | "draw", for select "sample": the distribution
                           from which tokens are drawn, after temperature, top_p and top_k |
                           "marginal": the distribution of each token over all texts that satisfy
                           the constraint; without a constraint, the same as "prediction" */
  double cfg_scale;     /* w, the scale of classifier-free guidance, 0..1000. 0 (default): no
                           guidance. Above 0: each pass also runs a second canvas, in which mask
                           tokens replace all given tokens. The guided logits are without + (w +
                           1)(with - without). Here `with` are the logits of the first canvas,
                           and `without` are the logits of the second canvas. The request fails
                           with UNSUPPORTED if the engine can run only one canvas per pass */
  const char* schedule; /* for commit "static", "dynamic" and "sequential": how many positions each
                           planned pass commits. "masked" (default): the masked positions of the
                           block are divided evenly among the passes | "block": all positions of the
                           block, including given ones, are divided evenly. So a block that starts
                           with given tokens needs fewer passes | "floor": after pass k of n,
                           floor(m * (n - k) / n) of the m masked positions are still masked */
  const char* reserve;  /* "none" (default) | "end": the last position of the canvas is not
                           generated. It contains an end token from the start, and counts as given.
                           "end" has no effect if the last position is given or is the only masked
                           position, if the denoiser has no end token, or if the request has a
                           constraint */
  int32_t reuse_prompt; /* for full attention with cache "prefix" or "dual" and refresh above 0.
                           1: the request reuses keys and values of an earlier request whose
                           prompt starts with the same tokens. But it computes the keys and
                           values of the last `refresh` tokens before the first block itself. The
                           result is an approximation, because reused keys and values also depend
                           on later tokens of the earlier request. 0 (default): the request
                           computes its whole prompt */
  double next_block;    /* for full attention and cache "none" or "prefix", and for denoisers with
                           blocks_after_prompt and cache "none" or "block": a share, 0..1 (1). When
                           this share of the positions of a block is decided, passes also commit
                           positions of the next block. 1: a block starts when the previous block is
                           finished. Commit "entropy_threshold" with cache "prefix" needs a value
                           below 1. Below 1, the commit rule must be "threshold" or
                           "entropy_threshold". Each pass then commits at least one position of the
                           first unfinished block. With compare ">=", it always commits the position
                           with the highest score too. With full attention, all positions after an
                           end token become end tokens. Otherwise, no block starts after an end
                           token. A value below 1 cannot be combined with edits, sub-blocks or a
                           store other than "pass" */
  double temperature_drop; /* for remask "noise" and select "sample", 0..1e30 (0): the amount by
                              which the temperature falls over the planned passes of a block. In
                              pass k of n, it has fallen by temperature_drop * (k - 1) / n */
  double stable_entropy;   /* for remask "noise" and score "entropy": a block ends before its last
                              planned pass if the mean entropy of its positions is below this number,
                              in nats, 0..1e9, and if its most likely tokens are stable (see
                              stable_passes). 0 (default): all planned passes are made */
  int32_t stable_passes;   /* for stable_entropy: a number of passes, 0..16777216 (1). The most
                              likely tokens of a block are stable if they were the same in this
                              number of previous passes */
  int32_t cache_delay;     /* for next_block below 1 and cache "prefix", 0..16777216 (0): the number
                              of passes after which the keys and values of a decided block are
                              stored. Until then, passes compute the whole canvas */
  int32_t refresh_interval; /* for next_block below 1 and cache "prefix", 0..16777216. Pass number
                               n, counted from 1, computes all stored keys and values again if n is
                               a multiple of this number. 0 (default): no pass does this */
  double finish_threshold;  /* for commit "threshold", "dynamic", "factor" and "longest_prefix",
                               0..1: if the scores of all undecided positions of a block are at
                               least this number, the pass commits all of them. 1 (default): no
                               pass does this. A lower number cannot be combined with remask "noise"
                               or "rewrite" */
  double force_next; /* for next_block below 1: a share, 0..1 (1). When this share of the positions
                        of a block is decided, each pass commits at least one position of the next
                        block. 1: only the first unfinished block has such a minimum */
} dlm_policy;
/* Sets *policy to the policy of LLaDA: commit "static", score "confidence", blocks of 32 tokens,
 * and no cache. */
DLM_API void dlm_policy_init(dlm_policy* policy, size_t struct_size);

/* Describes one field of dlm_policy, for tools and language bindings. */
typedef struct dlm_policy_field {
  size_t struct_size;
  const char* name;
  int32_t kind;               /* DLM_FIELD_... */
  size_t offset;              /* bytes from the start of dlm_policy */
  const char* const* choices; /* for DLM_FIELD_CHOICE: the possible strings, followed by NULL; the
                                 first string is the default. For other kinds: NULL */
  double initial;             /* the default value; unused for DLM_FIELD_CHOICE */
  double lowest, highest;     /* the smallest and the largest valid value; unused for
                                 DLM_FIELD_CHOICE */
} dlm_policy_field;
enum {
  DLM_FIELD_CHOICE = 0, /* the field is a const char* */
  DLM_FIELD_INT32 = 1,
  DLM_FIELD_DOUBLE = 2,
  DLM_FIELD_UINT64 = 3
};

/* Returns the field with this index. The first field after struct_size has the index 0, and the
 * other fields follow in the order of dlm_policy. Returns NULL after the last field. The result
 * is static. */
DLM_API const dlm_policy_field* dlm_policy_field_at(size_t index);

/* ---- Bundle ---------------------------------------------------------------------------------- */

typedef struct dlm_bundle dlm_bundle;

/* The severity of a log line, from the least to the most severe. */
enum {
  DLM_LOG_VERBOSE = 0,
  DLM_LOG_INFO = 1,
  DLM_LOG_WARNING = 2,
  DLM_LOG_ERROR = 3,
  DLM_LOG_FATAL = 4
};

/* Receives a line that the engine's library (ONNX Runtime or TensorRT) logs. The line has no line
 * break and no control characters. Any thread may call the function, also while another thread is
 * calling it. The function must not call the library. */
typedef void (*dlm_log_fn)(void* user, int32_t severity, const char* line);

typedef struct dlm_open_options {
  size_t struct_size;
  const char* engine;         /* "auto" (default) | "onnxruntime" | "tensorrt" | "none". "auto"
                                 means "tensorrt" if the bundle was built for GPUs, and otherwise
                                 "onnxruntime". With "none", the library opens and checks the
                                 bundle, but cannot run passes */
  const char* engine_library; /* path of libonnxruntime, libnvinfer, libnvinfer_lean or
                                 libtensorrt_rtx. NULL (default): the path in $DLM_ONNXRUNTIME or
                                 $DLM_TENSORRT, or the system's library if this variable is not
                                 set */
  int32_t threads;      /* for "onnxruntime", 0..4096. 0 (default): one thread per core. The library
                           never starts more threads than the process may use cores */
  int32_t check_hashes; /* 1 (default): the sizes and SHA-256 hashes of files are compared with the
                           manifest. A large file is not hashed again if it has not changed since an
                           earlier check that succeeded. But every file is hashed if $DLM_HASH_FILES
                           is "always" (default: "changed"), or if engine is "none". 0: only the
                           sizes of files are compared */
  const char* provider; /* for "onnxruntime": "cpu" (default) | "cuda" | "tensorrt" |
                           "nv_tensorrt_rtx". With a GPU provider, engine "auto" means
                           "onnxruntime" */
  int32_t device;       /* for GPU providers: index of the GPU in CUDA, 0 or more (0) */
  int32_t allow_fallback; /* 1: the CPU runs the nodes that the provider cannot run, and
                             dlm_bundle_info.engine lists them. 0 (default): if there are such
                             nodes, opening fails with UNSUPPORTED, and the message lists them */
  dlm_log_fn on_log;      /* receives log lines until the bundle is destroyed. NULL (default): log
                             lines are dropped. Errors reach the caller as messages either way */
  void* log_user;         /* passed to on_log (NULL) */
  int32_t log_severity;   /* the lowest severity that on_log receives, DLM_LOG_...
                             (DLM_LOG_WARNING) */
  const char* provider_library; /* path of the library with provider "nv_tensorrt_rtx". NULL
                                   (default): the path in $DLM_TENSORRT_RTX_PROVIDER, or
                                   libonnxruntime_providers_nv_tensorrt_rtx.so if this variable is
                                   not set */
  int32_t cuda_graphs; /* 1: with provider "cuda", the passes of a shape run as one CUDA graph. 0
                          (default): the driver starts each kernel of a pass separately */
} dlm_open_options;
DLM_API void dlm_open_options_init(dlm_open_options* options, size_t struct_size);

/* Notes on engines
 *
 * On a CPU, "onnxruntime" uses the kernels of this library if they are faster than those of ONNX
 * Runtime. There are several kernel sets: "amx-int8", "avx512-vnni", "avx-vnni", "avx2" and
 * "neon-dotprod". The library uses the first of these sets that the processor supports. To use
 * another set or no set, set $DLM_KERNELS to its name or to "none". To find out whether "amx-int8"
 * works, the library asks the operating system for permission to use AMX registers. In threads that
 * use these registers, signal frames are then 8 KiB larger.
 *
 * The official builds of ONNX Runtime store a device id and send telemetry, unless
 * $ORT_DISABLE_TELEMETRY is 1 before ONNX Runtime starts. If the variable is not set, opening a
 * bundle with engine "onnxruntime" sets it to 1. Changing the environment is not safe while
 * another thread reads it. If your program starts threads that read the environment, set the
 * variable before you start them.
 *
 * GPU providers need ONNX Runtime 1.24 or newer. "cuda" and "tensorrt" need a build that includes
 * the provider (onnxruntime-gpu). "nv_tensorrt_rtx" is in a separate library, which any build can
 * load (onnxruntime-ep-nv-tensorrt-rtx-cu13). It keeps the kernels that it compiles in
 * $XDG_CACHE_HOME/dlm-export or ~/.cache/dlm-export, unless other users can write there. All GPU
 * providers also need the library of the GPU driver ($DLM_CUDA_LIBRARY, by default libcuda.so.1).
 * If the bundle contains a graph for GPUs, the provider runs this graph. Sessions store their keys
 * and values on the GPU. Tokens are drawn there too if NVRTC can be loaded ($DLM_NVRTC, by default
 * libnvrtc.so.13 or libnvrtc.so.12). Otherwise, all logits are copied to the host.
 *
 * "tensorrt" needs a build of this library with TensorRT's headers. It runs on the first CUDA
 * device, which $CUDA_VISIBLE_DEVICES can select. The bundle must contain an engine file that was
 * built for the same kind of device and for the same version of TensorRT. libnvinfer_lean is opened
 * if the system has no libnvinfer, and only runs version-compatible engine files. If no engine file
 * can run, the error message gives the reason for each file. */

/* One of the kernel sets of this library. */
typedef struct dlm_kernel_set {
  const char* name;
  const char* refusal; /* the reason why the set cannot run on this processor; NULL if the set
                          can run */
} dlm_kernel_set;

/* Returns the kernel set with this index, or NULL if the index is too large. The first index is
 * 0. The list contains the sets for the processor architecture for which this library was built,
 * fastest first. The result is static. */
DLM_API const dlm_kernel_set* dlm_kernel_set_at(size_t index);

/* Opens the bundle in the folder `path`, checks it, and loads its engine. options may be NULL. If
 * the call fails, it writes the reason to the buffer `message`, which has room for message_capacity
 * bytes. The reason ends with a NUL. message may be NULL. `message` and message_capacity have the
 * same meaning in all calls of this library. Errors: NOT_FOUND, BAD_BUNDLE, UNSUPPORTED,
 * ENGINE_MISSING, ENGINE_FAILED, OUT_OF_MEMORY. */
DLM_API dlm_status dlm_bundle_open(const char* path, const dlm_open_options* options, char* message,
                                   size_t message_capacity, dlm_bundle** bundle);

/* Creates a bundle without files. The library calls `run` for each pass, on the thread that runs
 * the session or scheduler. So several threads may call `run` at the same time. The library copies
 * *denoiser. `user` must outlive the bundle. */
DLM_API dlm_status dlm_bundle_from_callback(const dlm_denoiser* denoiser, dlm_pass_fn run,
                                            void* user, char* message, size_t message_capacity,
                                            dlm_bundle** bundle);
DLM_API void dlm_bundle_destroy(dlm_bundle* bundle);

/* The properties of a bundle. The bundle owns this struct. */
typedef struct dlm_bundle_info {
  size_t struct_size;
  const dlm_denoiser* denoiser;
  const char* manifest; /* the text of manifest.json; "" if dlm_bundle_from_callback created the
                           bundle */
  const char* engine;   /* one line of text that describes the engine, for example "onnxruntime
                           1.31.1 (CPU)" */
} dlm_bundle_info;
DLM_API const dlm_bundle_info* dlm_bundle_describe(const dlm_bundle* bundle); /* returns NULL if
                                                                                 bundle is NULL */

/* Loads a prompt cache that dlm_session_save_prompt_cache wrote with the same bundle. After that,
 * if the prompt of a request of the bundle starts with the same tokens, the request uses the keys
 * and values of the prompt cache. Any thread may call this function. The library maps the file into
 * memory, so the file must not change until the bundle is destroyed. To save a new version, replace
 * the file. NOT_FOUND if the file is missing. BAD_BUNDLE if it is damaged, or was saved with
 * another bundle. UNSUPPORTED for the same reasons as in dlm_session_save_prompt_cache. */
DLM_API dlm_status dlm_bundle_load_prompt_cache(dlm_bundle* bundle, const char* path, char* message,
                                                size_t message_capacity);

/* Sets *policy to a preset of the bundle. Call dlm_policy_init on *policy first. preset is a
 * name, or NULL for the bundle's default preset. effort is NULL, or the name of an effort level:
 * "instant", "low", "medium" or "high". An effort level is a tuned version of the preset.
 * "instant" needs the fewest passes. A bundle contains effort levels for only one of its
 * presets. INVALID_ARGUMENT if the bundle contains no effort levels for the given preset.
 * NOT_FOUND if preset or effort is an unknown name; the message lists the valid names. */
DLM_API dlm_status dlm_bundle_policy(const dlm_bundle* bundle, const char* preset,
                                     const char* effort, char* message, size_t message_capacity,
                                     dlm_policy* policy);

/* ---- Text ------------------------------------------------------------------------------------ */

/* A tokenizer and a chat template, compiled into the bundle's text file. A dlm_text returns the
 * same token ids as the Hugging Face tokenizers library, and renders the same chats as Jinja.
 * `dlm-export build` compares the ids and the chats, and writes no text file if there is a
 * difference. Any number of threads may use a dlm_text at the same time. Each string is passed with
 * its size in bytes, and may contain NUL. INVALID_ARGUMENT for invalid UTF-8. */
typedef struct dlm_text dlm_text;

/* Returns the dlm_text of the bundle, which the bundle owns. The first call reads the text file.
 * UNSUPPORTED if the bundle contains no text file; the message gives the reason. */
DLM_API dlm_status dlm_bundle_text(dlm_bundle* bundle, char* message, size_t message_capacity,
                                   const dlm_text** text);

/* Makes a dlm_text from `data`, the content of a bundle's text file. The library copies the data.
 * BAD_BUNDLE if the data is damaged. */
DLM_API dlm_status dlm_text_read(const void* data, size_t size, char* message,
                                 size_t message_capacity, dlm_text** text);
DLM_API void dlm_text_destroy(dlm_text* text); /* must not be called for a result of
                                                  dlm_bundle_text */

/* Flags of dlm_text_encode and dlm_chat_encode. */
enum {
  DLM_ENCODE_PROMPT = 1, /* add the tokens that the tokenizer puts before and after a prompt */
  DLM_ENCODE_SPECIAL = 2 /* encode the text of a special token, such as "<|eos|>", as this special
                            token; without this flag, it is encoded as ordinary text */
};

/* Encodes a text. flags is a sum of DLM_ENCODE_ values. Sets *count to the number of ids. Writes at
 * most `capacity` ids, so a first call may pass capacity 0 to get the number of ids.
 * INVALID_ARGUMENT if the ids would include a special token, but flags does not include
 * DLM_ENCODE_SPECIAL. */
DLM_API dlm_status dlm_text_encode(const dlm_text* text, const char* string, size_t size,
                                   int32_t flags, char* message, size_t message_capacity,
                                   int32_t* tokens, size_t capacity, size_t* count);

/* Decodes token ids to text, and skips special tokens. Bytes that do not form a complete character
 * are replaced with U+FFFD. Sets *size to the size of the text in bytes. Writes at most `capacity`
 * bytes, without a NUL at the end. */
DLM_API dlm_status dlm_text_decode(const dlm_text* text, const int32_t* tokens, size_t count,
                                   char* message, size_t message_capacity, char* string,
                                   size_t capacity, size_t* size);

/* A message of a chat. Callers pass arrays of this struct, so it cannot get new fields until
 * DLM_ABI_VERSION increases. */
typedef struct dlm_message {
  const char* role; /* a role that the template knows: "system", "user", "assistant", "tool" */
  const char* content;
  size_t content_size; /* bytes */
} dlm_message;

/* Renders a chat as text. The text ends where the assistant's reply starts. size and capacity
 * have the same meaning as in dlm_text_decode. UNSUPPORTED if the template does more than put
 * fixed texts around the contents of messages. Then the error message gives the reason, and the
 * index of the chat message. */
DLM_API dlm_status dlm_chat_render(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, char* message, size_t message_capacity,
                                   char* string, size_t capacity, size_t* size);

/* Encodes a chat. The ids end where the assistant's reply starts. Special tokens that the
 * template writes are encoded as special tokens. If the content of a message contains the text
 * of a special token, this text is encoded as ordinary text, unless flags is DLM_ENCODE_SPECIAL.
 * Do not use dlm_chat_render and dlm_text_encode instead, because the rendered text does not
 * show which special tokens come from the template. count and capacity have the same meaning as
 * in dlm_text_encode. */
DLM_API dlm_status dlm_chat_encode(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, int32_t flags, char* message,
                                   size_t message_capacity, int32_t* tokens, size_t capacity,
                                   size_t* count);

/* ---- Constraints ----------------------------------------------------------------------------- */

/* A compiled constraint: an automaton that reads token ids and accepts the allowed texts. An
 * automaton is compiled for one vocabulary. Any number of requests and threads may use it at the
 * same time. */
typedef struct dlm_automaton dlm_automaton;

/* The kinds of constraints, which say how to read dlm_constraint.content. A constraint always
 * applies to the whole generated text. */
enum {
  DLM_CONSTRAINT_REGEX = 0,       /* a regular expression in the syntax of Rust's regex crate */
  DLM_CONSTRAINT_SCHEMA = 1,      /* a JSON Schema; the text is JSON that is valid against the
                                     schema */
  DLM_CONSTRAINT_ENUM = 2,        /* a JSON list of strings; the text is one of these strings */
  DLM_CONSTRAINT_JSON_OBJECT = 3, /* any JSON object; content is "" */
  DLM_CONSTRAINT_TREE = 4,        /* a tree of JSON objects. A tree can combine texts, regular
                                     expressions, schemas, grammars, JSON Lines, CSV and XML.
                                     docs/guides/c-api.md lists the members of the JSON objects */
  DLM_CONSTRAINT_GRAMMAR = 5,     /* a context-free grammar in GBNF, the notation of llama.cpp */
  DLM_CONSTRAINT_COMPILED = 6, /* data that dlm_automaton_write or dlm-export compile has written */
  DLM_CONSTRAINT_FILE = 7,     /* path of a file with the data of a compiled constraint */
  DLM_CONSTRAINT_DECISIONS = 8 /* the questions of a decision, as JSON: {"parts": [...], "is_open":
                                  false}. A part is either a fixed text or a question. A question is
                                  a list of 1 to 255 options. The generated text consists of all
                                  parts in order, with one option in place of each question. If
                                  is_open is false, an end token follows the last part. If is_open
                                  is true, any tokens may follow. dlm_result.option_probs contains
                                  the probability of each option */
};

/* Encodes a text with the program's tokenizer, and returns the id of the first token. Returns -1 if
 * the first token is not known. */
typedef int32_t (*dlm_first_token_fn)(void* user, const char* string, size_t size);

/* The source text of a constraint, together with options and limits for compiling it. Defaults are
 * in parentheses. */
typedef struct dlm_constraint {
  size_t struct_size;
  int32_t kind;        /* DLM_CONSTRAINT_... (DLM_CONSTRAINT_REGEX) */
  const char* content; /* the source text of the constraint, in the form that `kind` selects; must
                          be set, because the default is NULL */
  size_t content_size; /* bytes (0) */
  const char* before;  /* fixed text before the generated text. NULL (default): no such text. The
                          constraint applies to `before`, the generated text and `behind`
                          together */
  const char* behind;  /* fixed text after the generated text. NULL (default): no such text */

  /* Options for JSON. */
  const char* item_separator; /* text between the items of an array, and between the properties
                                 of an object (",") */
  const char* key_separator;  /* text between a property's name and its value (":") */
  int32_t indent;    /* number of spaces by which each nesting level is indented, 0..64, with each
                        item on a separate line. -1 (default): the JSON text has no line breaks */
  int32_t has_lines; /* 1: if the whole text is an array, each of its items is on a separate line
                        (0) */
  int32_t max_depth; /* limit for recursion, 0..64: how many times a schema or a rule of a grammar
                        may be nested in itself, and how deep a value may be nested if the schema
                        allows any value. -1 (default): 3, or less if the automaton would be too
                        large */
  int32_t any_order; /* 1: the properties of an object with at most 6 properties may be in any
                        order. 0 (default): properties are in the order of the schema */
  int32_t more_properties; /* 1: objects may have properties that the schema allows without naming
                              them. 0 (default): objects have only the properties that the schema
                              names */

  /* Limits. If compiling reaches a limit, the call fails with INVALID_ARGUMENT. */
  double seconds;        /* largest processor time for compiling, in seconds, 0 or more (30) */
  uint64_t memory_bytes; /* largest number of bytes of memory that compiling uses at the same
                            time (192 MiB) */
  int64_t states;        /* largest number of states of the automaton, 0 or more (131072) */
  int64_t edges;         /* largest number of edges of the automaton, 0 or more (4194304) */

  /* The vocabulary. Only programs that have their own tokenizer set these fields. */
  const char* const* tokens; /* [token_count], the bytes of each token; NULL for a token that never
                                occurs in a text. For an added token, such as <tool_call>: the byte
                                0xFE and the token's name; only trees that name the token allow it.
                                If `tokens` itself is NULL (default), the bundle's vocabulary is
                                used */
  const size_t* token_sizes; /* [token_count], the size of each element of `tokens` in bytes
                                (NULL) */
  size_t token_count;        /* (0) */
  int32_t vocab_size; /* size of the denoiser's vocabulary, 1..2^24; used only without a bundle
                         (0) */
  const int32_t* eos_token_ids;   /* [eos_count], ids of the end tokens; used only without a bundle
                                     (NULL) */
  size_t eos_count;               /* (0) */
  dlm_first_token_fn first_token; /* returns the first token of a text. NULL (default): the library
                                     does not know how the tokenizer splits texts */
  void* user;                     /* passed to first_token (NULL) */

  const uint8_t* made_of; /* 32 bytes that identify the source of the constraint;
                             dlm_automaton_write stores them. NULL (default): 32 zeros */

  /* For a vocabulary whose tokens have other bytes at the start of a text, for example because the
     tokenizer drops the first space. Used together with `tokens`. */
  const char* const* start_tokens; /* [token_count], the bytes of each token at the start of a text.
                                      NULL (default): the same as `tokens` */
  const size_t* start_token_sizes; /* [token_count], the size of each element of `start_tokens` in
                                      bytes (NULL) */
} dlm_constraint;
DLM_API void dlm_constraint_init(dlm_constraint* constraint, size_t struct_size);

/* Compiles a constraint for a bundle. bundle may be NULL if the constraint has the fields
 * tokens, vocab_size and eos_token_ids. Any thread may call this function. The first call for a
 * bundle also builds an index of the bundle's vocabulary, which takes about as long as reading
 * the vocabulary. If the program passes its own tokens, the first call with these tokens builds
 * an index of these tokens. INVALID_ARGUMENT if the content is invalid or not supported; the
 * message gives the position in the content. UNSUPPORTED if the bundle contains no text file and
 * `tokens` is NULL.
 *
 * For the kinds DLM_CONSTRAINT_COMPILED and DLM_CONSTRAINT_FILE, the function only reads and checks
 * the compiled data. It uses only the fields kind, content and content_size, and bundle may be
 * NULL. BAD_BUNDLE if the data is damaged. UNSUPPORTED if this library cannot read the version of
 * the data. NOT_FOUND if the file does not exist. */
DLM_API dlm_status dlm_automaton_compile(dlm_bundle* bundle, const dlm_constraint* constraint,
                                         char* message, size_t message_capacity,
                                         dlm_automaton** automaton);

/* Writes an automaton in the form that DLM_CONSTRAINT_COMPILED reads. Sets *size to the full size
 * of the data in bytes. Writes at most `capacity` bytes to `data`. */
DLM_API dlm_status dlm_automaton_write(const dlm_automaton* automaton, char* message,
                                       size_t message_capacity, void* data, size_t capacity,
                                       size_t* size);
DLM_API void dlm_automaton_destroy(dlm_automaton* automaton); /* running requests keep the automaton
                                                                 alive */

/* The properties of an automaton. This struct is valid as long as the automaton exists. */
typedef struct dlm_automaton_info {
  size_t struct_size;
  int32_t shortest; /* number of tokens in the shortest text that the automaton accepts, 0 or
                       more */
  int32_t states;   /* number of states, 1 or more */
  int32_t classes;  /* number of token classes; all tokens of a class behave in the same way in
                       every state */
  int32_t groups;   /* number of groups; a group consists of all classes that lead from one state to
                       the same next state */
  int32_t edges;    /* number of edges; an edge leads from one state to another, and the edge's
                       group contains the tokens that lead along the edge */
  const char* warnings; /* one warning per line, for example about keywords of a schema that look
                           misspelled. "" if there are no warnings, or if the automaton was read and
                           not compiled */
} dlm_automaton_info;
DLM_API const dlm_automaton_info* dlm_automaton_describe(const dlm_automaton* automaton);

/* ---- Requests -------------------------------------------------------------------------------- */

/* The canvas after a step of a request. If the request has a limit (max_new_tokens), later steps
 * may have a longer canvas. If the denoiser has an expand_token_id, later steps may also have a
 * shorter canvas. The pointers are valid until the next call on the session. In a
 * callback, they are valid until the callback returns. */
typedef struct dlm_step {
  size_t struct_size;
  const int32_t* canvas; /* [length] */
  const int32_t* guess;  /* [length], the token that the last pass proposed for each undecided
                            position; -1 for a decided position, and for a position that the last
                            pass did not score */
  const float* score;    /* [length], the score of each proposal in `guess`; 0 if the guess is -1 */
  const uint8_t* undecided; /* [length], 1 if the position is undecided, otherwise 0. At an
                               undecided position, `canvas` contains the token that the next pass
                               uses there */
  int32_t length;
  int32_t block_start, block_end; /* the block that the request fills now: positions
                                     block_start..block_end-1 */
  int32_t nfe;                    /* number of passes so far */
  int32_t committed;              /* number of positions that this step committed or edited */
  int32_t done;     /* 1 if this is the last step, because the request has ended; dlm_result.finish
                       gives the reason */
  const char* text; /* if dlm_request.text is DLM_TEXT_STEPS: the text that this step adds, then
                       NUL. It consists of complete characters, and later steps do not change it.
                       Otherwise: "" */
  size_t text_size; /* size of `text` in bytes, without the NUL */
  int32_t prompt_tokens; /* number of given tokens, as in dlm_result */
} dlm_step;

/* The library calls this function after each pass of a request, on the thread that runs the pass.
 * If the request then ends without a further pass, the library calls the function once more. If the
 * function returns a number other than 0, the request ends with DLM_CANCELLED. In a callback of a
 * session, the only call on this session that succeeds is dlm_session_cancel; all other calls
 * return INVALID_ARGUMENT. A callback of a scheduler must not wait for a job, and must not run or
 * destroy the scheduler. */
typedef int32_t (*dlm_step_fn)(void* user, const dlm_step* step);

/* Decodes token ids, for programs that have their own tokenizer. The function writes at most
 * `capacity` bytes to string, and sets *size to the size of the whole text in bytes, which is at
 * most 65536 bytes per token. If *size is larger than capacity, the library calls the function once
 * more, with a capacity of *size. If the function returns a status other than DLM_OK, the request
 * ends with this status. */
typedef dlm_status (*dlm_decode_fn)(void* user, const int32_t* tokens, size_t count, char* string,
                                    size_t capacity, size_t* size);

#define DLM_DEFAULT_NEW_TOKENS (-1)

/* Values of dlm_request.text, which say what text the library makes for a request. */
enum {
  DLM_TEXT_NONE = 0,   /* the library makes no text, unless the request has stop strings */
  DLM_TEXT_RESULT = 1, /* the text of the result */
  DLM_TEXT_STEPS = 2   /* the text of the result, and the text that each step adds */
};

/* A request describes a canvas and how to fill its mask tokens. Fields are 0 or NULL by default,
 * unless their comments say otherwise. The library copies all data that the request points to. The
 * program may destroy the constraint when the request has started. `user` must stay valid until the
 * request has ended. */
typedef struct dlm_request {
  size_t struct_size;

  /* The given tokens. Set at most one of `tokens`, `prompt` and `messages`. If `tokens` contains
   * mask tokens, the request fills them too. A prompt or a chat needs the bundle's text
   * (dlm_bundle_text). INVALID_ARGUMENT if one of these pointers or stop_strings is not NULL but
   * its count is 0. The only exception is the empty prompt: `prompt_size` is 0, and `prompt` points
   * to a NUL byte, as the literal "" does. */
  const int32_t* tokens;
  size_t token_count;
  const char* prompt;
  size_t prompt_size; /* bytes */
  const dlm_message* messages;
  size_t message_count;
  int32_t special_tokens; /* 1: if the prompt or a message contains the text of a special token,
                             this text is encoded as the special token. 0 (default): it is encoded
                             as ordinary text */

  /* The tokens that the request generates. */
  int32_t max_new_tokens;   /* the largest number of tokens to generate after the given tokens, 0 or
                               more. If the given tokens leave less room on the longest canvas, the
                               limit is this room. DLM_DEFAULT_NEW_TOKENS (default): the denoiser's
                               max_new_tokens. With full attention, the canvas starts with the
                               denoiser's max_new_tokens mask tokens, or more if the constraint's
                               shortest text needs more. Whenever all positions are decided without
                               an end token, the canvas grows by one block, up to the limit. If the
                               denoiser has an expand_token_id, the canvas grows only by expand
                               tokens. If the given tokens then contain mask tokens, the canvas
                               starts with the given tokens alone */
  const dlm_policy* policy; /* NULL (default): the bundle's default preset, or the policy of
                               dlm_policy_init if dlm_bundle_from_callback created the bundle */
  int32_t steps; /* planned number of passes for all mask tokens with which the canvas starts. The
                    library divides them evenly among the blocks. Each block by which the canvas
                    grows gets as many passes as the block before it. 0 (default): the policy's
                    steps_per_block applies */
  const dlm_automaton*
      constraint; /* NULL (default): any text is allowed. Otherwise the tokens from the first to
                     the last undecided position are a text that the automaton accepts. End
                     tokens follow the text if there is room. The text satisfies the constraint
                     with every policy, even if the request ends early */
  int32_t constrained_tokens; /* number of given tokens with which the constrained text starts (0).
                                 These are the last tokens before the first undecided position. The
                                 tokenizer must split their text into the same tokens */

  /* Limits that may end the request before all positions are decided. */
  int32_t max_steps;  /* the largest number of passes, 0 or more; 0 (default): no limit */
  double deadline_ms; /* milliseconds, 0..1e12, counted from the call that starts or submits the
                         request. A pass that is running at the deadline is completed. 0 (default):
                         no deadline */
  const char* const* stop_strings; /* [stop_count], texts that are not empty. The result's text
                                      ends before the first stop string. If stop strings overlap,
                                      the one that ends first counts */
  size_t stop_count;

  /* The outputs of the request. */
  int32_t text;         /* DLM_TEXT_... (DLM_TEXT_NONE) */
  int32_t text_start;   /* canvas position where the result's text starts. -1 (default): after the
                           given tokens, or at position 0 if the canvas starts with the given tokens
                           alone */
  dlm_decode_fn decode; /* NULL (default): the library decodes with the bundle's text */
  dlm_step_fn on_step;  /* may be NULL (default) */
  void* user;           /* passed to decode and on_step */

  int32_t top_log_probs; /* number of alternative tokens to report for each position, 0..20; see
                            dlm_result.top_tokens. 0 (default): no alternatives */
  int32_t prefix_group; /* 0 or more (0). A request reuses only keys and values of requests with the
                           same number, and of prompt caches. Give each customer a number of its
                           own, so that no customer can find out how the prompts of others begin */
  int64_t new_tokens;   /* the exact number of mask tokens to add after the given tokens, instead of
                           the limit max_new_tokens, as in published decoding loops; 1 or more.
                           INVALID_ARGUMENT if they do not fit on the canvas. 0 (default):
                           max_new_tokens applies */
} dlm_request;
DLM_API void dlm_request_init(dlm_request* request, size_t struct_size);

/* Counts and times of one request. If several requests share a pass, each request counts the
 * pass. The library divides the time of the pass among these requests, so the times of all
 * requests add up to the elapsed time. */
typedef struct dlm_stats {
  size_t struct_size;
  int32_t nfe; /* number of passes of the request: prefill_passes + denoise_passes + store_passes +
                  verify_passes */
  int32_t prefill_passes; /* number of passes that store or recompute cached keys and values:
                             passes over given tokens, and with cache "prefix" or "dual" the
                             first pass of each block */
  int32_t denoise_passes; /* number of passes that predict tokens, including draft
                             passes */
  int32_t store_passes;   /* for cache "block": number of passes that store finished blocks */
  double prefill_s;       /* time of prefill_passes and store_passes in the engine, in seconds */
  double passes_s;        /* time of denoise_passes and verify_passes in the engine, in seconds */
  double selection_s;     /* seconds for scoring, ranking and committing tokens */
  double cache_s;         /* seconds for moving keys and values between passes */
  double total_s; /* seconds from start to end of the request, without the time in the program's
                     callbacks. This is more than the sum of the other times, because it includes
                     the time between passes */
  uint64_t cache_bytes;  /* largest number of bytes that the keys and values of the request used at
                            the same time; 0 without a cache */
  int32_t cached_tokens; /* number of tokens at the start of the prompt whose keys and values were
                            reused from other requests of the same scheduler or session, or from a
                            prompt cache */
  int32_t verify_passes; /* for commit "verify": number of causal passes that verify drafts */
  int32_t verified_tokens; /* for commit "verify": number of tokens that the causal passes decided.
                              The mean acceptance length is verified_tokens / verify_passes */
} dlm_stats;

/* The reason why a request ended. */
enum {
  DLM_FINISH_NONE = 0,      /* the request failed, see dlm_result.status */
  DLM_FINISH_STOP = 1,      /* an end token or a stop string ended the text */
  DLM_FINISH_LENGTH = 2,    /* all positions are decided, without an end token */
  DLM_FINISH_STEPS = 3,     /* max_steps was reached */
  DLM_FINISH_DEADLINE = 4,  /* deadline_ms was reached */
  DLM_FINISH_CANCELLED = 5, /* cancelled by dlm_session_cancel, dlm_job_cancel or
                               dlm_scheduler_destroy */
  DLM_FINISH_CONSTRAINT = 6 /* all positions are decided without an end token, and the text of the
                               constraint is complete */
};

/* The result of a request. If the request ended before all positions were decided, the library
 * fills the undecided positions. If there is a constraint, the library first completes its text.
 * Every other undecided position gets the token that the last pass proposed for it. If the last
 * pass proposed no token for a position, this position gets the first end token, or the mask token
 * if the denoiser has no end token. The session or job owns the result. */
typedef struct dlm_result {
  size_t struct_size;
  dlm_status status;         /* DLM_OK, or an error status if the request failed. After an error,
                                only message and stats are set */
  const char* message;       /* why the request failed; "" if it did not fail */
  int32_t finish;            /* DLM_FINISH_... */
  int32_t prompt_tokens;     /* number of given tokens */
  int32_t completion_tokens; /* number of generated tokens before the first end token or stop
                                string */
  const int32_t* tokens;     /* [length], the canvas */
  const float* log_probs;    /* [length], ln p for each committed token. p is the probability of the
                                token in the pass that committed it, computed by softmax over all
                                tokens except the mask token. If no pass committed a position, the
                                entry is NaN. All other entries are finite: if p rounds to 0, the
                                entry is -744.44, the logarithm of the smallest positive double */
  const uint8_t* undecided;  /* [length], 1 if the position was undecided when the request ended */
  size_t length;             /* length of the canvas in tokens */
  const char* text;          /* the text before the first end token or stop string, then NUL; "" for
                                DLM_TEXT_NONE */
  size_t text_size;          /* size of `text` in bytes, without the NUL */
  int32_t is_text_decided;   /* 1 if all tokens of the text are decided, including the tokens that
                                end it; otherwise 0 */
  double constraint_log_prob_loss; /* how much the constraint lowered the log probability of the
                                      text, in nats, 0 or more. This is a sum over all positions.
                                      Each position adds ln p of the denoiser's most likely token
                                      minus ln p of the committed token, in the last pass that
                                      scored the position. This difference is at most 745. A
                                      position that no pass scored adds 0. Without a constraint,
                                      the sum is 0 */
  const dlm_stats* stats;
  /* The next two arrays list alternatives for each position: the most likely tokens in the pass
   * that committed the position, most likely first. The committed token may be missing if it was
   * unlikely. An unused entry is -1 in top_tokens and NaN in top_log_probs. If no pass committed a
   * position, all its entries are unused. The last entries are unused if the vocabulary has fewer
   * than top_count tokens. */
  const int32_t* top_tokens;  /* [length, top_count] */
  const float* top_log_probs; /* [length, top_count], ln p of each token in top_tokens; p is defined
                                 at log_probs */
  size_t top_count;           /* dlm_request.top_log_probs */
  const double* option_probs; /* [option_count], for DLM_CONSTRAINT_DECISIONS: the probability of
                                 each option of the first question, then of each option of the
                                 second question, and so on. The library computes the
                                 probabilities from the first pass over each block. If the whole
                                 text is in one block (block_length 0), the probability of an
                                 option is the total probability of all allowed texts that
                                 contain the option, divided by the total probability of all
                                 allowed texts. The probability of a text is the product of the
                                 probabilities of its tokens at temperature 1. If the text is in
                                 several blocks, the probabilities in a later block depend on the
                                 tokens that were committed in earlier blocks. If several options
                                 are still possible at the end of a block, they share the
                                 probability equally. NULL if the constraint has another kind, or
                                 if the library made no pass */
  size_t option_count;
} dlm_result;

/* ---- Session: requests on the caller's thread ------------------------------------------------ */

typedef struct dlm_session dlm_session;

/* Creates a session. OUT_OF_MEMORY if the memory of the host or of the device is too small for the
 * session. */
DLM_API dlm_status dlm_session_create(dlm_bundle* bundle, char* message, size_t message_capacity,
                                      dlm_session** session);
DLM_API void dlm_session_destroy(dlm_session* session); /* must not be called from a callback of
                                                           the session */

/* Returns why the last call on the session failed, or "" if that call succeeded. The text is valid
 * until the next call on the session. */
DLM_API const char* dlm_session_last_error(const dlm_session* session);

/* The library calls this function before every pass of a session or scheduler, on the thread that
 * runs the pass. A program can use the function to react to a signal before the next pass. If the
 * function of a session returns a number other than 0, the running call ends with DLM_CANCELLED,
 * and the session drops its requests. The function may call dlm_session_cancel. */
typedef int32_t (*dlm_before_pass_fn)(void* user);

/* Sets the function that the library calls before every pass of the session. The function stays set
 * until the next call of dlm_session_before_pass. NULL removes the function. */
DLM_API dlm_status dlm_session_before_pass(dlm_session* session, dlm_before_pass_fn before_pass,
                                           void* user);

/* Sets the largest number of bytes of keys and values that the session keeps between its calls.
 * A later request reuses these keys and values if its prompt starts with the same tokens. A
 * request that needs more bytes still runs, but the session then drops the keys and values of
 * earlier requests. 0 (default): the session keeps no keys and values. Reuse needs a denoiser
 * with block-causal attention, and an engine that can share passes. Each call of this function
 * drops the kept keys and values, and also the running request, if there is one. */
DLM_API dlm_status dlm_session_prefix_cache(dlm_session* session, uint64_t bytes);

/* Computes the keys and values of tokens [count], and writes them to the file `path`, which is
 * called a prompt cache. The library writes only whole pages. A page consists of whole blocks of
 * the denoiser, and is the shortest sequence of blocks with at least 16 tokens. If `saved` is not
 * NULL, sets *saved to the number of tokens whose keys and values were written. The file appears
 * only when it is complete, and replaces an existing file. If a request is running, the session
 * drops it. INVALID_ARGUMENT if the tokens do not fill a page, or if the file cannot be written.
 * UNSUPPORTED if the denoiser has full attention, or if the engine cannot share passes. */
DLM_API dlm_status dlm_session_save_prompt_cache(dlm_session* session, const int32_t* tokens,
                                                 size_t count, const char* path, size_t* saved);

/* Runs a request until it ends, and returns dlm_result.status. *result is valid until the session
 * starts a new request. result may be NULL. If the request is invalid, sets *result to NULL. */
DLM_API dlm_status dlm_session_generate(dlm_session* session, const dlm_request* request,
                                        const dlm_result** result);

/* Runs several requests until they end. At most max_batch (1..4096) requests run at the same
 * time. Each request has its own options. If requests share a pass, the pass reads the
 * denoiser's weights only once.
 *
 * On a CPU, all requests share passes. On a GPU or with a callback, requests share passes only
 * if their canvases have the same length. If they use a cache, their mask tokens must also be in
 * the same blocks, and store must not be "reuse". At the end of each block, the requests that
 * share passes wait for the slowest of these requests. The result of each request is the same as
 * if it ran alone, except for the engine's floating-point noise.
 *
 * If a request is invalid, the call fails before the first pass. If a request fails during a pass,
 * only this request ends. When all requests have ended, the call returns the status of the failed
 * request with the lowest index, and the message contains this index. The first index is 0.
 * dlm_session_result returns the results. UNSUPPORTED if max_batch is more than the engine allows.
 * "tensorrt" runs one request at a time. */
DLM_API dlm_status dlm_session_generate_batch(dlm_session* session,
                                              const dlm_request* const* requests,
                                              size_t request_count, int32_t max_batch);

/* The next two functions run a request like dlm_session_generate, but one pass at a time. Call
 * dlm_session_start once, and then dlm_session_step until step->done is 1. Starting a new request
 * drops the running request of the session. If dlm_session_step fails, the request has ended. */
DLM_API dlm_status dlm_session_start(dlm_session* session, const dlm_request* request);
DLM_API dlm_status dlm_session_step(dlm_session* session, const dlm_step** step);

/* Returns the result of a request that has ended. `number` is the index of the request in
 * dlm_session_generate_batch, and 0 after other calls. The result is valid until the session starts
 * a new request. The call returns DLM_OK even if the request failed. INVALID_ARGUMENT if no request
 * has this index, or if the request has not ended. */
DLM_API dlm_status dlm_session_result(dlm_session* session, size_t number,
                                      const dlm_result** result);

/* Ends a running request after at most one more pass. The result of the request contains the
 * canvas after this pass, and `finish` is DLM_FINISH_CANCELLED. `number` is the index of the
 * request as in dlm_session_result, or DLM_ALL_REQUESTS. Any thread and any callback may call
 * this function. If no running request has this index, the function does nothing. */
#define DLM_ALL_REQUESTS SIZE_MAX
DLM_API void dlm_session_cancel(dlm_session* session, size_t number);

/* Runs one full pass over tokens [count], without filling mask tokens. Writes the raw logits
 * [row_count, V] of the given rows to `logits`. A row is the index of a position, 0..count-1, even
 * if dlm_denoiser.shift is 1. row_count is 1..count. `capacity` is the number of floats that fit
 * into `logits`. If a request is running, the session drops it. With blocks_after_prompt, the
 * prompt ends before the first mask token. */
DLM_API dlm_status dlm_session_logits(dlm_session* session, const int32_t* tokens, size_t count,
                                      const int32_t* rows, size_t row_count, float* logits,
                                      size_t capacity);

/* Measures the time of `repeats` passes over arbitrary tokens. Writes the time of each pass in
 * seconds to the array `seconds` [repeats]. Each pass runs `batch` requests (1..4096). For each
 * request, the pass computes `tokens` tokens, reads `cached` cached tokens, and scores `rows`
 * rows (1..tokens). If `cached` is above 0, one more pass fills the cache first. The call does
 * not measure the time of this pass. If `repeats` is 0, the call only checks the arguments. If a
 * request is running, the session drops it. INVALID_ARGUMENT or UNSUPPORTED if the denoiser or
 * the engine cannot run a pass with these arguments. */
DLM_API dlm_status dlm_session_time_passes(dlm_session* session, int32_t batch, int32_t tokens,
                                           int32_t cached, int32_t rows, double* seconds,
                                           size_t repeats);

/* ---- Scheduler: requests from any thread, passes on one thread
 * --------------------------------- */

/* A scheduler runs requests that many threads submit. On a CPU ("onnxruntime"), all running
 * requests share every pass. Between two passes, finished requests leave and waiting requests
 * start. On a GPU or with a callback, the requests take turns, and each turn is one pass. The
 * result of each request is the same as if it ran alone, except for the engine's floating-point
 * noise. Requests start in the order in which they were submitted. Each pass prefers the
 * requests that have waited longest. */
typedef struct dlm_scheduler dlm_scheduler;
typedef struct dlm_job dlm_job; /* a submitted request */

/* A linear model that predicts the time of a pass. All times are in milliseconds, 0 or more. The
 * predicted time is pass_ms, plus token_ms for each token, plus row_ms for each scored row, plus
 * pair_ms for each attention pair. A pair is a token and a position that the token attends to.
 * `dlm-export bench --cost` measures these four times. There is no _init function for this struct,
 * so set struct_size yourself. */
typedef struct dlm_pass_cost {
  size_t struct_size; /* sizeof(dlm_pass_cost) */
  double pass_ms, token_ms, row_ms, pair_ms;
} dlm_pass_cost;

typedef struct dlm_scheduler_options {
  size_t struct_size;
  int32_t max_running;  /* largest number of requests that run at the same time, 1..4096 (16) */
  int32_t max_waiting;  /* largest number of requests in the queue, 1..1048576 (1024). If the queue
                           is full, a further request is rejected with BUSY */
  int32_t max_tokens;   /* largest number of tokens in a shared pass, 1 or more (512). A request
                           that does not fit into a pass waits for the next pass. If a single
                           request has more than max_tokens tokens in a pass, it runs alone */
  uint64_t cache_bytes; /* largest number of bytes for the keys and values of all running requests
                           together. A request starts only when there is room for its whole canvas.
                           0 (default): 1 GiB, or more if the longest canvas needs more */
  double max_pass_ms;   /* limit for the predicted time of a shared pass, in milliseconds, 0 or
                           more. A request starts only if a pass over its block and the current
                           blocks of all running requests would stay within this limit, or if no
                           other request is running. 0 (default): no limit */
  const dlm_pass_cost* cost; /* the model that predicts times for max_pass_ms and for
                                dlm_scheduler_stats.expected_s. NULL (default): no model. If recent
                                passes took longer than predicted, the library increases its
                                predictions for max_pass_ms accordingly */
  int32_t ended_fd; /* file descriptor of an eventfd, or of the writing end of a non-blocking pipe;
                       -1 (default): no descriptor. Whenever a request ends, the scheduler writes
                       the number 1 to this descriptor, as 8 bytes. So a program can wait for many
                       jobs with one call of poll(). ended_fd must stay open until the scheduler is
                       destroyed */
  uint64_t prefix_cache_bytes; /* largest number of bytes, out of cache_bytes, for keys and values
                                  of requests that have ended. A later request reuses these keys and
                                  values if its prompt starts with the same tokens. UINT64_MAX
                                  (default): all bytes of cache_bytes that running requests do not
                                  use. 0: requests reuse nothing. Reuse needs a denoiser with
                                  block-causal attention, and an engine that can share passes */
} dlm_scheduler_options;
DLM_API void dlm_scheduler_options_init(dlm_scheduler_options* options, size_t struct_size);

/* Creates a scheduler. options may be NULL. INVALID_ARGUMENT if max_pass_ms is set without cost.
 * UNSUPPORTED if max_pass_ms is set but the engine cannot share passes. */
DLM_API dlm_status dlm_scheduler_create(dlm_bundle* bundle, const dlm_scheduler_options* options,
                                        char* message, size_t message_capacity,
                                        dlm_scheduler** scheduler);

/* Cancels all requests that have not ended, and destroys the scheduler. The jobs stay valid. This
 * function must not be called while dlm_scheduler_run is active. */
DLM_API void dlm_scheduler_destroy(dlm_scheduler* scheduler);

/* Submits a request. Any thread may call this function. The caller must destroy the job. The thread
 * that runs dlm_scheduler_run calls the callbacks of the request until the request has ended, even
 * if the job was destroyed before that. BUSY if the queue is full. INVALID_ARGUMENT if the request
 * is invalid, or if the keys and values of its canvas need more than cache_bytes. If
 * dlm_scheduler_run has failed, this call returns the same status, until dlm_scheduler_run is
 * called again. */
DLM_API dlm_status dlm_scheduler_submit(dlm_scheduler* scheduler, const dlm_request* request,
                                        char* message, size_t message_capacity, dlm_job** job);

/* Runs passes on the calling thread until dlm_scheduler_stop is called. If until_idle is 1, the
 * call also returns when no request remains. before_pass may be NULL. If before_pass returns a
 * number other than 0, the call returns DLM_CANCELLED. The requests then remain, and the next call
 * continues them.
 *
 * If a request fails, only this request ends. The call itself can also fail, because of missing
 * memory or an exception from before_pass. Then every request that has not ended fails with the
 * same status and message, so that no thread waits forever. After that, dlm_scheduler_run can be
 * called again. INVALID_ARGUMENT if another thread is in dlm_scheduler_run. */
DLM_API dlm_status dlm_scheduler_run(dlm_scheduler* scheduler, int32_t until_idle,
                                     dlm_before_pass_fn before_pass, void* user, char* message,
                                     size_t message_capacity);

/* Makes dlm_scheduler_run return after the current pass. If no thread is in dlm_scheduler_run, the
 * next call of dlm_scheduler_run returns at once. Any thread may call this function. */
DLM_API void dlm_scheduler_stop(dlm_scheduler* scheduler);

typedef struct dlm_scheduler_stats {
  size_t struct_size;
  int32_t waiting, running; /* number of requests that wait in the queue, and number of requests
                               that run */
  int64_t submitted, finished, refused; /* counts since the scheduler was created. `submitted`:
                                           submitted requests. `finished`: requests that have ended.
                                           `refused`: requests that were rejected with DLM_BUSY */
  int64_t passes;                       /* number of passes */
  int64_t shares;        /* sum over all passes of the number of requests in the pass */
  double busy_s;         /* seconds spent in passes and commits */
  uint64_t cache_bytes;  /* largest number of bytes that the keys and values of all requests used at
                            the same time */
  double passes_s;       /* seconds spent in passes, without commits */
  double expected_s;     /* predicted value of passes_s; 0 without a cost model, or if the engine
                            cannot share passes */
  int64_t prefix_hits;   /* number of requests that reused keys and values of other requests or of a
                            prompt cache */
  int64_t prefix_tokens; /* sum of the reused tokens (dlm_stats.cached_tokens) of all requests */
  uint64_t prefix_bytes; /* number of bytes of keys and values that new requests can reuse */
} dlm_scheduler_stats;

/* Copies the current statistics to *stats. `struct_size` is the size of *stats in bytes. Any thread
 * may call this function. */
DLM_API void dlm_scheduler_get_stats(const dlm_scheduler* scheduler, dlm_scheduler_stats* stats,
                                     size_t struct_size);

/* Waits until the job's request has ended, but at most for timeout_ms milliseconds. If timeout_ms
 * is below 0, there is no time limit. Returns 1 if the request has ended, otherwise 0. */
DLM_API int32_t dlm_job_wait(const dlm_job* job, double timeout_ms);

/* If the job's request has ended, sets *result to its result, and returns its status. The result is
 * valid until the job is destroyed. If the request has not ended, sets *result to NULL, and returns
 * INVALID_ARGUMENT. */
DLM_API dlm_status dlm_job_result(const dlm_job* job, const dlm_result** result);

/* Ends the job's request after at most one more pass. The result of the request contains the
 * canvas after this pass, and `finish` is DLM_FINISH_CANCELLED. Any thread and any callback may
 * call this function. */
DLM_API void dlm_job_cancel(dlm_job* job);

/* Destroys the job. If the job's request has not ended, this cancels the request. But the
 * library may still call the request's callbacks during the current pass. To be sure that no
 * more callbacks run, call dlm_job_cancel and dlm_job_wait before dlm_job_destroy. A job may
 * outlive its scheduler. */
DLM_API void dlm_job_destroy(dlm_job* job);

#ifdef __cplusplus
}
#endif
#endif /* DLM_RUNTIME_H */
