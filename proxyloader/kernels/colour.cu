// Image operations with Pillow's own arithmetic, or torchvision's (TENSOR_*), on RGB images: uint8, HWC.
//
//   stats         sums and histograms, of jobs that start with contrast, autocontrast or equalize
//   tables        what such a step makes of each level
//   pixels        jobs that start with a step that reads other pixels, or have only steps on single pixels
//   blur_rows, blur_columns   box blurs, a line at a time in shared memory
//   blur_tensor   torchvision's Gaussian blur, a tile at a time
//
// Grids are (parts of the largest image, jobs) unless it is said. Blocks past the end of a smaller image return.

extern __shared__ uint shared_words[];

typedef int Pixel::*Channel;

template <class Level> __device__ Pixel by_channel(Level level) {
    return {level(&Pixel::r), level(&Pixel::g), level(&Pixel::b)};
}

// To a level, as C does it: towards zero. Comparing first keeps huge values defined.
__device__ int clip(int v) { return clip_to(v, 255); }
template <class Real> __device__ int clip(Real v) { return v <= 0 ? 0 : v >= 255 ? 255 : (int)v; }

__device__ float between_0_and_1(float v) { return v < 0.0f ? 0.0f : v > 1.0f ? 1.0f : v; }

// Image.blend. Between 0 and 1 Pillow does not clip, and need not.
__device__ int blend(int a, int b, float factor) { return clip((float)a + factor * (float)(b - a)); }

// Image.convert("L")
__device__ int grey(Pixel p) { return (p.r * 19595 + p.g * 38470 + p.b * 7471 + 0x8000) >> 16; }

// rgb_to_grayscale of a tensor: torch's add with alpha, which only v2 calls, is fused
__device__ float tensor_grey(Pixel p, bool is_v1) {
    if (is_v1) return floorf((float)0.2989 * p.r + (float)0.587 * p.g + (float)0.114 * p.b);
    return floorf(fmaf((float)p.b, (float)0.114, fmaf((float)p.g, (float)0.587, (float)p.r * (float)0.2989)));
}

// _blend of both versions
__device__ int tensor_blend(float a, float b, double ratio, bool is_v1) {
    if (is_v1) return clip((float)ratio * a + (float)(1.0 - ratio) * b);
    return clip(fmaf(b, (float)(1.0 - ratio), a * (float)ratio));
}

// --- statistics ------------------------------------------------------------------------------------------------------

#define PIXELS_PER_STATS_BLOCK 8192

// The grey whose mean is that of a contrast. torchvision takes the only channel of a grayscale tensor as it is.
__device__ int grey_for(const Step &step, Pixel p) {
    if (step.code == CONTRAST) return grey(p);
    return step.numbers[2] != 0 ? p.r : (int)tensor_grey(p, step.numbers[1] != 0);
}

extern "C" __global__ void stats(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const int begin = blockIdx.x * PIXELS_PER_STATS_BLOCK;
    const int end = min(begin + PIXELS_PER_STATS_BLOCK, job.height * job.width);
    if (begin >= end) return;
    const Step &step = batch.steps[job.first];
    const bool is_sum = step.code == CONTRAST || step.code == TENSOR_CONTRAST;
    Stats &to = batch.stats[job.stats];
    for (int i = threadIdx.x; i < 768; i += blockDim.x) shared_words[i] = 0;
    __syncthreads();
    uint sum = 0;  // 8192 pixels of 255 fit
    for (int at = begin + threadIdx.x; at < end; at += blockDim.x) {
        const Pixel p = pixel_of(job.source + 3 * (size_t)at);
        if (is_sum) {
            sum += grey_for(step, p);
            continue;
        }
        atomicAdd(&shared_words[p.r], 1u);
        atomicAdd(&shared_words[256 + p.g], 1u);
        atomicAdd(&shared_words[512 + p.b], 1u);
    }
    if (is_sum) atomicAdd(&shared_words[0], sum);
    __syncthreads();
    if (is_sum && threadIdx.x == 0) atomicAdd(&to.grey_sum, (ullong)shared_words[0]);
    for (int i = threadIdx.x; i < 768 && !is_sum; i += blockDim.x)
        if (shared_words[i]) atomicAdd(&to.counts[0][0] + i, shared_words[i]);
}

// --- tables ----------------------------------------------------------------------------------------------------------

// ImageOps.autocontrast
__device__ int stretched(int v, int low, int high) {
    if (high <= low) return v;
    const double scale = 255.0 / (high - low), offset = -low * scale;
    return clip((int)(v * scale + offset));
}

// ImageOps.equalize; Image.point clips what exceeds 255
__device__ int equalized(int v, const uint *counts, uint pixels, uint of_highest) {
    const uint step = (pixels - of_highest) / 255;
    if (!step) return v;
    uint below = 0;
    for (int level = 0; level < v; level++) below += counts[level];
    return min((step / 2 + below) / step, 255u);
}

// autocontrast of a tensor
__device__ int tensor_stretched(int v, int low, int high, bool is_v1) {
    if (high == low) return v;
    if (is_v1) return clip((float)(v - low) * (1.0f / (float)(high - low) * 255.0f));
    return clip((float)(v - low) / ((float)(high - low) * (float)(1.0 / 255.0)));
}

__device__ int table_value(const Step &step, int v, ullong grey_sum, const uint *counts, uint pixels) {
    const double *n = step.numbers;
    int low = 0, high = 255;
    while (low < 255 && !counts[low]) low++;
    while (high > 0 && !counts[high]) high--;
    switch (step.code) {
        case CONTRAST: return blend((int)((double)grey_sum / pixels + 0.5), v, (float)n[0]);
        case AUTOCONTRAST: return stretched(v, low, high);
        case EQUALIZE: return equalized(v, counts, pixels, counts[high]);
        // torch sums float32; the same as long as the sum is below 2^24
        case TENSOR_CONTRAST: return tensor_blend((float)v, (float)grey_sum / (float)pixels, n[0], n[1] != 0);
    }
    return tensor_stretched(v, low, high, n[0] != 0);
}

// Grid: (3 channels, jobs). A block of 256 threads.
extern "C" __global__ void tables(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const int channel = blockIdx.x, v = threadIdx.x;
    Stats &stats = batch.stats[job.stats];
    const uint *counts = stats.counts[channel];
    stats.table[channel][v] = table_value(batch.steps[job.first], v, stats.grey_sum, counts, job.height * job.width);
}

// --- one pixel to one pixel ------------------------------------------------------------------------------------------

// The colour of a sixth of the hues, from its highest level, its lowest, and those that fall and rise within the sixth.
__device__ Pixel of_sector(int sector, int v, int a, int q, int t) {
    switch (sector) {
        case 0: return {v, t, a};
        case 1: return {q, v, a};
        case 2: return {a, v, t};
        case 3: return {a, q, v};
        case 4: return {t, a, v};
        default: return {v, a, q};
    }
}

// convert("HSV"), a turn of hue that wraps at 256, convert("RGB"). Convert.c computes parts of it in double. This is in
// float32 and integers, written so that each of the 2^24 colours, and each of the 2^24 of HSV, gives the same levels.
__device__ Pixel hue_turned(Pixel p, int turn) {
    const int high = max(p.r, max(p.g, p.b)), low = min(p.r, min(p.g, p.b)), range = high - low;
    if (range == 0) return p;
    const float part = (float)(2 * high + low - p.r - p.g - p.b) / (float)range;  // from the highest to the middle one
    float h;
    if (p.r == high) h = p.b == low ? 1.0f - part : part - 1.0f;
    else if (p.g == high) h = p.b == low ? 1.0f + part : 3.0f - part;
    else h = p.r == low ? 3.0f + part : 5.0f - part;
    const float turns = h >= 0.0f ? h / 6.0f : fmaf(h, 1.0f / 6.0f, 1.0f);
    const int hue = ((int)(turns * 255.0f) + turn) & 255;
    const int sector = 2 * hue / 85;
    const float f = (float)(2 * hue - 85 * sector) / 85.0f, s = (float)(range * 255 / high) / 255.0f, v = (float)high;
    const int a = (int)(v * (1.0f - s) + 0.5f);
    const int q = (int)(v * (1.0f - s * f) + 0.5f);
    const int t = (int)(v * (1.0f - s * (1.0f - f)) + 0.5f);
    return of_sector(sector % 6, high, a, q, t);
}

// adjust_hue of a tensor: all in float32, each operation rounded. v1 divides, v2 multiplies.
__device__ Pixel tensor_hue_turned(Pixel p, double turn, bool is_v1) {
    const int how = is_v1 ? 1 : 2;
    const float r = scaled(p.r, how), g = scaled(p.g, how), b = scaled(p.b, how);
    const float high = fmaxf(r, fmaxf(g, b)), low = fminf(r, fminf(g, b));
    const float range = high - low, divisor = high == low ? 1.0f : range;
    const float s = range / (high == low ? 1.0f : high);
    const float rc = (high - r) / divisor, gc = (high - g) / divisor, bc = (high - b) / divisor;
    const bool is_r = high == r, is_g = high == g && !is_r;
    float h = is_r ? bc - gc : is_g ? rc + 2.0f - bc : gc + 4.0f - rc;
    h = fmodf((is_v1 ? h / 6.0f : h * (float)(1.0 / 6.0)) + 1.0f, 1.0f) + (float)turn;
    h = fmodf(h, 1.0f);  // remainder_ has the sign of the divisor
    if (h < 0.0f) h += 1.0f;
    const float h6 = h * 6.0f, sector = floorf(h6), f = h6 - sector;
    const float sf = s * f, not_s = 1.0f - s, to_level = 255.999f;
    const int v = clip(high * to_level), a = clip(between_0_and_1(not_s * high) * to_level);
    const int q = clip(between_0_and_1((1.0f - sf) * high) * to_level);
    const int t = clip(between_0_and_1((is_v1 ? 1.0f - s * (1.0f - f) : sf + not_s) * high) * to_level);
    return of_sector((int)sector % 6, v, a, q, t);
}

__device__ int channel_of(Pixel p, int channel) { return channel == 0 ? p.r : channel == 1 ? p.g : p.b; }

// Image.convert("RGB", matrix): products in float, the half in double
__device__ int mixed(Pixel p, const double *m) {
    return clip((float)((float)m[0] * p.r + (float)m[1] * p.g + (float)m[2] * p.b + (float)m[3] + 0.5));
}

__device__ int level_changed(const Batch &batch, const Step &step, int v, int channel) {
    const double *n = step.numbers;
    switch (step.code) {
        case TABLE: return ((const uchar *)(batch.extras + step.extra))[channel * 256 + v];
        case BRIGHTNESS: return blend(0, v, (float)n[0]);
        case POSTERIZE: return v & ~((1 << (8 - (int)n[0])) - 1);
        case SOLARIZE: return v < n[0] ? v : 255 - v;
        case SOLARIZE_ADD: return v < 128 ? clip(v + (int)n[0]) : v;
        case INVERT: return 255 - v;
    }
    return clip((float)v * (float)n[0]);  // TENSOR_BRIGHTNESS
}

__device__ Pixel changed(const Batch &batch, const Job &job, const Step &step, Pixel p, int x, int y) {
    const double *n = step.numbers;
    switch (step.code) {
        case CONTRAST: case AUTOCONTRAST: case EQUALIZE: case TENSOR_CONTRAST: case TENSOR_AUTOCONTRAST: {
            const Stats &stats = batch.stats[job.stats];
            return {stats.table[0][p.r], stats.table[1][p.g], stats.table[2][p.b]};
        }
        case SATURATION: return by_channel([&](Channel c) { return blend(grey(p), p.*c, (float)n[0]); });
        case GREY: { const int l = grey(p); return {l, l, l}; }
        case HUE: return hue_turned(p, (int)n[0]);
        case CHANNELS: return {channel_of(p, (int)n[0]), channel_of(p, (int)n[1]), channel_of(p, (int)n[2])};
        case MATRIX: return {mixed(p, n), mixed(p, n + 4), mixed(p, n + 8)};
        case ERASE:  // left, top, right, bottom, colour
            if (x < n[0] || y < n[1] || x >= n[2] || y >= n[3]) return p;
            return {(int)n[4], (int)n[5], (int)n[6]};
        case TENSOR_SATURATION: {
            const bool is_v1 = n[1] != 0;
            return by_channel([&](Channel c) { return tensor_blend(p.*c, tensor_grey(p, is_v1), n[0], is_v1); });
        }
        case TENSOR_GREY: { const int l = (int)tensor_grey(p, n[0] != 0); return {l, l, l}; }
        case TENSOR_HUE: return tensor_hue_turned(p, n[0], n[1] != 0);
    }
    return {level_changed(batch, step, p.r, 0), level_changed(batch, step, p.g, 1), level_changed(batch, step, p.b, 2)};
}

// --- other pixels ----------------------------------------------------------------------------------------------------

// Image.filter of a kernel. Pillow starts with the row below, adds a row at a time, and leaves the border alone.
template <int SIDE, class Weight>
__device__ Pixel convolved(const Job &job, int x, int y, float offset, Weight weight) {
    const int reach = SIDE / 2;
    if (x < reach || y < reach || x >= job.width - reach || y >= job.height - reach) return pixel_at(job, x, y);
    float r = (float)(offset + 0.5), g = r, b = r;
#pragma unroll
    for (int row = 0; row < SIDE; row++) {
        const uchar *p = job.source + 3 * ((size_t)(y + reach - row) * job.source_width + x - reach);
        const float left = weight(row * SIDE);
        float line_r = p[0] * left, line_g = p[1] * left, line_b = p[2] * left;
        for (int i = 1; i < SIDE; i++) {
            const float w = weight(row * SIDE + i);
            line_r += p[3 * i] * w, line_g += p[3 * i + 1] * w, line_b += p[3 * i + 2] * w;
        }
        r += line_r, g += line_g, b += line_b;
    }
    return {clip(r), clip(g), clip(b)};
}

__device__ Pixel sharpened(const Job &job, int x, int y, float factor) {
    const auto weight = [](int i) { return i == 4 ? 5.0f / 13.0f : 1.0f / 13.0f; };  // ImageFilter.SMOOTH
    const Pixel p = pixel_at(job, x, y), smooth = convolved<3>(job, x, y, 0.0f, weight);
    return by_channel([&](Channel c) { return blend(smooth.*c, p.*c, factor); });
}

// adjust_sharpness of a tensor. Thirteenths are never half way between two levels: integers round as float sums do.
// v1 blends the border with itself.
__device__ Pixel tensor_sharpened(const Job &job, int x, int y, double ratio, bool is_v1) {
    const Pixel p = pixel_at(job, x, y);
    if (job.width <= 2 || job.height <= 2) return p;
    if (x < 1 || y < 1 || x >= job.width - 1 || y >= job.height - 1)
        return is_v1 ? by_channel([&](Channel c) { return tensor_blend(p.*c, p.*c, ratio, true); }) : p;
    Pixel sum = {4 * p.r, 4 * p.g, 4 * p.b};
    for (int i = 0; i < 9; i++) {
        const Pixel near = pixel_at(job, x + i % 3 - 1, y + i / 3 - 1);
        sum.r += near.r, sum.g += near.g, sum.b += near.b;
    }
    return by_channel([&](Channel c) {
        const int smooth = (sum.*c + 6) / 13;
        if (is_v1) return tensor_blend(p.*c, smooth, ratio, true);
        return clip(fmaf((float)(smooth - p.*c), (float)(1.0 - ratio), (float)(p.*c)));
    });
}

// Geometry.c cuts towards zero, after what is below zero went to -1
__device__ int coordinate(double v) { return v < 0.0 ? -1 : (int)v; }
__device__ int whole(double v) { return v < 0.0 ? (int)floor(v) : (int)v; }

// Pillow adds `step` once per pixel, and each sum is rounded. If both are multiples of 2^-20 no sum is.
__device__ double accumulated(double start, double step, int count) {
    const double scale = 1048576.0;
    if (start * scale == floor(start * scale) && step * scale == floor(step * scale)) return start + step * count;
    for (int i = 0; i < count; i++) start += step;
    return start;
}

__device__ bool fits_fixed_point(const double *a, int x, int y) {
    return fabs(x * a[0] + y * a[1] + a[2]) < 32768.0 && fabs(x * a[3] + y * a[4] + a[5]) < 32768.0;
}

__device__ int fixed_point(double v) { return whole(v * 65536.0 + 0.5); }
__device__ int fixed_position(double a, double b, double c, int x, int y) {
    // unsigned, as the products may wrap; their sum does not
    return (int)((uint)fixed_point(c + a * 0.5 + b * 0.5) + (uint)fixed_point(a) * x + (uint)fixed_point(b) * y) >> 16;
}

// Nearest pixel of an affine map. Pillow has three ways, that differ in how positions are rounded. Fixed point is for
// maps of the whole result, whatever the size of the source.
__device__ Pixel nearest_affine(const Job &job, const double *a, int x, int y, Pixel fill) {
    const int w = job.width, h = job.height;
    int from_x, from_y;
    if (a[1] == 0 && a[3] == 0) {
        from_x = coordinate(accumulated(a[2] + a[0] * 0.5, a[0], x));
        from_y = coordinate(accumulated(a[5] + a[4] * 0.5, a[4], y));
    } else if (fits_fixed_point(a, 0, 0) && fits_fixed_point(a, w, h) && fits_fixed_point(a, 0, h) &&
               fits_fixed_point(a, w, 0)) {
        from_x = fixed_position(a[0], a[1], a[2], x, y);
        from_y = fixed_position(a[3], a[4], a[5], x, y);
    } else {
        from_x = coordinate(accumulated(accumulated(a[2] + a[1] * 0.5 + a[0] * 0.5, a[1], y), a[0], x));
        from_y = coordinate(accumulated(accumulated(a[5] + a[4] * 0.5 + a[3] * 0.5, a[4], y), a[3], x));
    }
    const bool is_inside = from_x >= 0 && from_x < job.source_width && from_y >= 0 && from_y < job.source_height;
    return is_inside ? pixel_at(job, from_x, from_y) : fill;
}

__device__ double mix(double a, double b, double d) { return a + (b - a) * d; }

__device__ Pixel bilinear(const Job &job, double x_at, double y_at) {
    x_at -= 0.5, y_at -= 0.5;
    const int x = whole(x_at), y = whole(y_at), right = job.source_width - 1, bottom = job.source_height - 1;
    const double dx = x_at - x, dy = y_at - y;
    // below the last row Pillow repeats the upper line; a clamped row gives that too
    const int x0 = max(x, 0), x1 = min(x + 1, right), y0 = max(y, 0), y1 = min(y + 1, bottom);
    const Pixel a = pixel_at(job, x0, y0), b = pixel_at(job, x1, y0);
    const Pixel c = pixel_at(job, x0, y1), d = pixel_at(job, x1, y1);
    return by_channel([&](Channel k) { return (int)mix(mix(a.*k, b.*k, dx), mix(c.*k, d.*k, dx), dy); });
}

__device__ double cubic(double a, double b, double c, double d, double at) {
    const double p2 = -a + c, p3 = 2 * (a - b) + c - d, p4 = -a + b - c + d;
    return b + at * (p2 + at * (p3 + at * p4));
}

__device__ Pixel bicubic(const Job &job, double x_at, double y_at) {
    x_at -= 0.5, y_at -= 0.5;
    const int x = whole(x_at), y = whole(y_at), right = job.source_width - 1, bottom = job.source_height - 1;
    const double dx = x_at - x, dy = y_at - y;
    const auto line = [&](Channel c, int i) {
        const auto level = [&](int k) { return pixel_at(job, clip_to(x + k, right), clip_to(y + i, bottom)).*c; };
        return cubic(level(-1), level(0), level(1), level(2), dx);
    };
    return by_channel([&](Channel c) { return clip(cubic(line(c, -1), line(c, 0), line(c, 1), line(c, 2), dy)); });
}

// What the opcodes of warps have in common: 0 nearest, 1 bilinear, 2 bicubic.
__device__ Pixel sampled(const Job &job, int kind, double x, double y, Pixel fill) {
    if (!(x >= 0.0 && x < job.source_width && y >= 0.0 && y < job.source_height)) return fill;
    if (kind == 0) return pixel_at(job, (int)x, (int)y);
    return kind == 1 ? bilinear(job, x, y) : bicubic(job, x, y);
}

__device__ Pixel affine(const Job &job, int kind, const double *a, int x, int y, Pixel fill) {
    if (kind == 0) return nearest_affine(job, a, x, y, fill);
    const double u = x + 0.5, v = y + 0.5;
    return sampled(job, kind, a[0] * u + a[1] * v + a[2], a[3] * u + a[4] * v + a[5], fill);
}

__device__ Pixel perspective(const Job &job, int kind, const double *a, int x, int y, Pixel fill) {
    const double u = x + 0.5, v = y + 0.5, depth = a[6] * u + a[7] * v + 1;
    return sampled(job, kind, (a[0] * u + a[1] * v + a[2]) / depth, (a[3] * u + a[4] * v + a[5]) / depth, fill);
}

// A coordinate on the grid of torchvision's affine, rotate and perspective: theta is divided by half a side first.
// torch multiplies matrices with MKL, which rounds each product on the CPUs that this was compared on.
__device__ float on_grid(const double *theta, float x, float y, int side) {
    const float half = 0.5f * side;
    return x * ((float)theta[0] / half) + y * ((float)theta[1] / half) + (float)theta[2] / half;
}

// grid_sample: the grid spans the image from -1 to 1. GCC fuses what torch wrote as product and sum.
__device__ float grid_to_pixels(float at, int side) { return fmaf(at + 1.0f, 0.5f * side, -0.5f); }

// The first three are a colour, the last is the mask: 1 in the image and 0 outside.
struct Masked { float at[4]; };

__device__ Masked masked_pixel(const Job &job, float x, float y) {
    if (!(x >= 0.0f && x < job.source_width && y >= 0.0f && y < job.source_height)) return {{0, 0, 0, 0}};
    const Pixel p = pixel_at(job, (int)x, (int)y);
    return {{(float)p.r, (float)p.g, (float)p.b, 1.0f}};
}

__device__ Masked tensor_bilinear(const Job &job, float x, float y) {
    const float left = floorf(x), top = floorf(y), w = x - left, n = y - top, e = 1.0f - w, s = 1.0f - n;
    const float nw = e * s, ne = w * s, sw = e * n, se = w * n;
    const Masked a = masked_pixel(job, left, top), b = masked_pixel(job, left + 1.0f, top);
    const Masked c = masked_pixel(job, left, top + 1.0f), d = masked_pixel(job, left + 1.0f, top + 1.0f);
    Masked sum;
    for (int i = 0; i < 4; i++)
        sum.at[i] = fmaf(d.at[i], se, fmaf(c.at[i], sw, fmaf(b.at[i], ne, a.at[i] * nw)));
    return sum;
}

// To uint8 as torch casts: the lowest bits of an integer. What is no number, as beyond a horizon, becomes 0.
__device__ int tensor_level(float v) { return v == v ? (uchar)(int)rintf(v) : 0; }

// _apply_grid_transform of v1 and of v2
__device__ int filled(float v, float mask, float fill, int blend) {
    if (blend == 1) v = v * mask + (1.0f - mask) * fill;
    if (blend == 2) v = (v - fill) * mask + fill;
    return tensor_level(v);
}

// Kinds are the opcodes in their order.
__device__ Pixel tensor_warped(const Job &job, int kind, const double *n, int x, int y) {
    const double *theta = n + 4;
    float grid_x, grid_y;
    if (kind < 2) {
        const float from_center_x = x - 0.5f * (job.width - 1), from_center_y = y - 0.5f * (job.height - 1);
        grid_x = on_grid(theta, from_center_x, from_center_y, job.source_width);
        grid_y = on_grid(theta + 3, from_center_x, from_center_y, job.source_height);
    } else {
        const float u = x + 0.5f, v = y + 0.5f, depth = u * (float)theta[6] + v * (float)theta[7] + 1.0f;
        grid_x = on_grid(theta, u, v, job.width) / depth - 1.0f;
        grid_y = on_grid(theta + 3, u, v, job.height) / depth - 1.0f;
    }
    const float at_x = grid_to_pixels(grid_x, job.source_width), at_y = grid_to_pixels(grid_y, job.source_height);
    const int blend = (int)n[3];
    const float r = (float)n[0], g = (float)n[1], b = (float)n[2];
    if (kind % 2 == 0) {
        const Masked p = masked_pixel(job, rintf(at_x), rintf(at_y));
        if (blend && p.at[3] == 0.0f) return {tensor_level(r), tensor_level(g), tensor_level(b)};
        return {(int)p.at[0], (int)p.at[1], (int)p.at[2]};
    }
    const Masked p = tensor_bilinear(job, at_x, at_y);
    return {filled(p.at[0], p.at[3], r, blend), filled(p.at[1], p.at[3], g, blend),
            filled(p.at[2], p.at[3], b, blend)};
}

// As floats, with a cast back. Each pixel makes all weights of its own: this is rare.
__device__ Pixel tensor_resized(const Job &job, const double *n, int x, int y) {
    const FloatResize to = {job.height, job.width, (int)n[0], n[1] != 0};
    const Colour mean = to.at(job, x, y, [&](int level) { return (float)level; });
    return {clip(rintf(mean.r)), clip(rintf(mean.g)), clip(rintf(mean.b))};
}

// The same pixel of branches, by the places of these.
__device__ Pixel mixed(const Batch &batch, const Job &job, const double *n, int x, int y) {
    const Pixel p = pixel_at(job, x, y);
    const size_t at = 3 * ((size_t)y * job.width + x);
    float r = (float)n[1] * p.r, g = (float)n[1] * p.g, b = (float)n[1] * p.b;
    for (int i = 0; i < (int)n[0]; i++) {
        const uchar *q = batch.scratch + (size_t)n[9 + i] + at;
        const float weight = (float)n[2 + i];
        r += weight * q[0], g += weight * q[1], b += weight * q[2];
    }
    return {(int)r, (int)g, (int)b};
}

__device__ Pixel blended(const Batch &batch, const Job &job, const double *n, int x, int y) {
    const Pixel p = pixel_at(job, x, y);
    const Pixel q = pixel_of(batch.scratch + (size_t)n[9] + 3 * ((size_t)y * job.width + x));
    return by_channel([&](Channel c) { return blend(p.*c, q.*c, (float)n[0]); });
}

// What a step that is not from pixel to pixel starts a job with.
__device__ Pixel gathered(const Batch &batch, const Job &job, const Step &step, int x, int y) {
    const double *n = step.numbers;
    const float *extras = batch.extras + step.extra;
    const auto extra = [&](int i) { return extras[i]; };  // of a kernel: its weights, divided by the scale already
    switch (step.code) {
        case SELECT: return pixel_at(job, (int)extras[job.height + x], (int)extras[y]);
        case MIX: return mixed(batch, job, n, x, y);
        case BLEND: return blended(batch, job, n, x, y);
        case SHARPNESS: return sharpened(job, x, y, (float)n[0]);
        case TENSOR_SHARPNESS: return tensor_sharpened(job, x, y, n[0], n[1] != 0);
        case KERNEL3: return convolved<3>(job, x, y, (float)n[0], extra);
        case KERNEL5: return convolved<5>(job, x, y, (float)n[0], extra);
        case TENSOR_RESIZE: return tensor_resized(job, n, x, y);
    }
    if (step.code >= TENSOR_AFFINE_NEAREST) return tensor_warped(job, step.code - TENSOR_AFFINE_NEAREST, n, x, y);
    // colour of what is outside, then the map
    const Pixel fill = {(int)n[0], (int)n[1], (int)n[2]};
    if (step.code <= AFFINE_BICUBIC) return affine(job, step.code - AFFINE_NEAREST, n + 3, x, y, fill);
    return perspective(job, step.code - PERSPECTIVE_NEAREST, n + 3, x, y, fill);
}

// A thread has one pixel.
extern "C" __global__ void pixels(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= job.height * job.width) return;
    const int x = at % job.width, y = at / job.width;
    const Step *step = batch.steps + job.first, *end = step + job.count;
    Pixel p = step->code >= SELECT ? gathered(batch, job, *step++, x, y) : pixel_at(job, x, y);
    for (; step < end; step++) p = changed(batch, job, *step, p, x, y);
    uchar *to = job.target + 3 * (size_t)at;
    to[0] = p.r, to[1] = p.g, to[2] = p.b;
}

// --- box blurs -------------------------------------------------------------------------------------------------------

// A box that reaches `radius` levels to both sides. In 2^-24: the weight `inner` of each, and `outer` of the next two.
struct Box { int radius; uint inner, outer; };

__device__ Box box_of(float radius) {
    const uint inner = (uint)((float)(1 << 24) / (radius * 2 + 1));
    return {(int)radius, inner, ((1u << 24) - ((int)radius * 2 + 1) * inner) / 2};
}

#define BLUR_RUN 8  // levels that a thread makes: it sums the box of the first, then moves it

// A line whose levels are `stride` apart. What is past an end is as the end.
__device__ void blur_run(const uchar *from, uchar *to, int length, int stride, int begin, Box box) {
    uint sum = 0;
    for (int i = begin - box.radius; i <= begin + box.radius; i++) sum += from[clip_to(i, length - 1) * stride];
    for (int i = begin; i < min(begin + BLUR_RUN, length); i++) {
        const uint before = from[clip_to(i - box.radius - 1, length - 1) * stride];
        const uint after = from[clip_to(i + box.radius + 1, length - 1) * stride];
        to[i * stride] = (sum * box.inner + (before + after) * box.outer + (1 << 23)) >> 24;
        sum += after - from[clip_to(i - box.radius, length - 1) * stride];
    }
}

// Blurs `lines` lines side by side. `stride` bytes are between the levels of a line, in shared memory `lines` bytes.
__device__ void blur_along(const uchar *from, uchar *to, int length, int lines, int stride, float radius, int passes) {
    const Box box = box_of(radius);
    const int bytes = lines * length, runs = (length + BLUR_RUN - 1) / BLUR_RUN;
    uchar *a = (uchar *)shared_words, *b = a + bytes;
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) a[i] = from[(size_t)(i / lines) * stride + i % lines];
    for (int pass = 0; pass < passes; pass++) {
        __syncthreads();
        for (int i = threadIdx.x; i < runs * lines; i += blockDim.x)
            blur_run(a + i % lines, b + i % lines, length, lines, i / lines * BLUR_RUN, box);
        uchar *swapped = a;
        a = b, b = swapped;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) to[(size_t)(i / lines) * stride + i % lines] = a[i];
}

// Numbers of BOX_BLUR: radius along x, along y, passes. A row is three lines: its channels. Grid: (rows, jobs).
extern "C" __global__ void blur_rows(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    if ((int)blockIdx.x >= job.height) return;
    const double *n = batch.steps[job.first].numbers;
    const size_t row = (size_t)blockIdx.x * 3 * job.width;
    blur_along(job.source + row, job.target + row, job.width, 3, 3, (float)n[0], n[0] == 0 ? 0 : (int)n[2]);
}

#define BLUR_STRIP 32     // bytes of each row: a whole sector of memory, or less
#define BLUR_BYTES 65536  // of shared memory, for the strip of a tall image

// In place, after blur_rows. Grid: (strips of the widest image, jobs).
extern "C" __global__ void blur_columns(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const int strip = max(min(BLUR_BYTES / 2 / job.height, BLUR_STRIP), 1);
    const int bytes = 3 * job.width, left = blockIdx.x * strip, lines = min(strip, bytes - left);
    const double *n = batch.steps[job.first].numbers;
    if (lines <= 0 || n[1] == 0) return;
    blur_along(job.target + left, job.target + left, job.height, lines, bytes, (float)n[1], (int)n[2]);
}

// --- torchvision's Gaussian blur -------------------------------------------------------------------------------------

// Past an edge, the image is mirrored without its first pixel.
__device__ int reflected(int i, int length) {
    return clip_to(i < 0 ? -i : i >= length ? 2 * length - 2 - i : i, length - 1);  // what is past that is not used
}

template <class Value> __device__ float weighted_sum(const float *weights, int reach, Value value) {
    float sum = 0;
    for (int i = 0; i < 2 * reach + 1; i++) sum = fmaf(weights[i], value(i), sum);
    return sum;
}

// gaussian_blur of a PIL image or a uint8 tensor: float32, rounded once. torch sums products over a square, in an order
// that its library chooses; this sums along x, then along y. Where a sum is all but half way, the level may differ.
// Numbers: reach along x, along y; extras: the weights of both. Grid: (tiles of the largest image, jobs).
extern "C" __global__ void blur_tensor(Batch batch, int first) {
    const Job job = batch.jobs[first + blockIdx.y];
    const int tiles = (job.width + TILE - 1) / TILE, bytes = 3 * job.width;
    const int left = blockIdx.x % tiles * TILE, top = blockIdx.x / tiles * TILE;
    if (top >= job.height) return;
    const double *n = batch.steps[job.first].numbers;
    const float *given = batch.extras + batch.steps[job.first].extra;
    const int reach_x = (int)n[0], reach_y = (int)n[1], rows = TILE + 2 * reach_y, count = 2 * (reach_x + reach_y) + 2;
    float *weights = (float *)shared_words, *lines = weights + count, *weights_y = weights + 2 * reach_x + 1;
    for (int i = threadIdx.x; i < count; i += blockDim.x) weights[i] = (float)given[i];
    __syncthreads();
    for (int i = threadIdx.x; i < rows * ROW_BYTES; i += blockDim.x) {
        const int level = i % ROW_BYTES, begin = left + level / 3 - reach_x, row = top - reach_y + i / ROW_BYTES;
        const uchar *line = job.source + (size_t)reflected(row, job.height) * bytes + level % 3;
        lines[i] = weighted_sum(weights, reach_x, [&](int k) { return line[3 * reflected(begin + k, job.width)]; });
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * ROW_BYTES; i += blockDim.x) {
        const int level = i % ROW_BYTES, y = i / ROW_BYTES;
        if (3 * left + level >= bytes || top + y >= job.height) continue;
        const float sum = weighted_sum(weights_y, reach_y, [&](int k) { return lines[i + k * ROW_BYTES]; });
        job.target[(size_t)(top + y) * bytes + 3 * left + level] = (uchar)rintf(sum);
    }
}
