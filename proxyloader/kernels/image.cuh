// What both modules share. The host puts `enum Opcode`, made from programs.OPCODES, before this text, and colour.cu or
// resize.cu behind it. The structs are those of programs.py.
//
// Compile with --fmad=false (g++: -ffp-contract=off). Pillow's wheels for x86-64 round each product before they add;
// with fused multiply-add some levels would differ by one. Where torch fuses, these sources call fmaf.

typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned long long ullong;

struct Step {
    int code, extra;
    int run, table;  // number of steps of the run from level to level that starts here, and its table
    double numbers[16];
};

struct Job {
    const uchar *source;
    uchar *target;
    long long table_x, table_y;            // of a resize: where its weights are in the pool
    long long row_stride, channel_stride;  // of the output, in elements
    int source_height, source_width, height, width;
    int first, count;  // steps
    int stats;         // only valid if the first step needs statistics
    int source_base, target_base;  // used by the host alone
};

struct Run { int first, count, job, table; };
struct Stats { ullong grey_sum; uint counts[3][256]; };

struct Batch {
    const Job *jobs;
    const Step *steps;
    const Run *runs;
    const float *extras;
    Stats *stats;   // zeros at the start
    uchar *tables;  // 3 x 256 for each run
    int *pool;      // weights of resizes
    const uchar *scratch;  // where the results of jobs are
};

static_assert(sizeof(Step) == 144 && sizeof(Job) == 88 && sizeof(Run) == 16 && sizeof(Stats) == 3080, "programs.py");
struct Pixel { int r, g, b; };

__device__ Pixel pixel_at(const Job &job, int x, int y) {
    const uchar *p = job.source + 3 * ((size_t)y * job.source_width + x);
    return {p[0], p[1], p[2]};
}

// Four neighbours are three words, if the first starts at a multiple of four bytes.
__device__ void load_quad(const uchar *from, int count, Pixel quad[4]) {
    if (count == 4 && ((size_t)from & 3) == 0) {
        const uint *words = (const uint *)from;
        const uint a = words[0], b = words[1], c = words[2];
        quad[0] = {(int)(a & 255), (int)(a >> 8 & 255), (int)(a >> 16 & 255)};
        quad[1] = {(int)(a >> 24), (int)(b & 255), (int)(b >> 8 & 255)};
        quad[2] = {(int)(b >> 16 & 255), (int)(b >> 24), (int)(c & 255)};
        quad[3] = {(int)(c >> 8 & 255), (int)(c >> 16 & 255), (int)(c >> 24)};
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        quad[i] = {0, 0, 0};
        if (i < count) quad[i] = {from[3 * i], from[3 * i + 1], from[3 * i + 2]};
    }
}

__device__ int clip_to(int v, int high) { return v < 0 ? 0 : v > high ? high : v; }
