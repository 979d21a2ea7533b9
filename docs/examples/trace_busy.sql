-- How busy each stream is, of the time from the first kernel to the last. For traces that msplit writes: trace_processor -q trace_busy.sql trace.json
WITH kernel AS (
  SELECT slice.ts, slice.dur, thread.utid, thread.name AS stream, process.name AS run, MIN(slice.ts) OVER step AS first, MAX(slice.ts + slice.dur) OVER step AS last
  FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
  WHERE slice.category = 'kernel'
  WINDOW step AS (PARTITION BY process.upid))
SELECT run, stream, COUNT(*) AS kernels, SUM(dur) / 1e3 AS busy_us, 100.0 * SUM(dur) / (last - first) AS percent
FROM kernel GROUP BY utid ORDER BY busy_us DESC;
